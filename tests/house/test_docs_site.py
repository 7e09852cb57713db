"""The documentation as a site: built as `make docs` builds it, complete, with links that lead somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.corpus import load_regression
from attnfuzz.inputs.layouts import split_interleaved, token_views
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.problems.supports import Layout
from tests.sample_cases import paged_case

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


class Page(HTMLParser):
    """What a page can be linked to by, and where it leads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name == "id":
                self.ids.add(value)
            elif value and name in ("href", "src"):
                self.links.append(value)


def broken(site: Path) -> Iterator[tuple[str, str]]:
    """Page and link of all that lead nowhere within the site."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = pages[target].ids if target in pages else set()
            if not target.exists() or (parts.fragment and known and unquote(parts.fragment) not in known):
                yield str(path.relative_to(site)), link


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a new folder, as ``make docs`` does it; a warning fails the build."""
    folder = tmp_path_factory.mktemp("site").resolve()
    (recipe,) = re.findall(r"^\t\$\(BIN\)/python (-m sphinx .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    arguments = recipe.replace("build/docs", str(folder)).split()
    command = [sys.executable, *arguments[:2], "--doctree-dir", str(folder.parent / "doctrees"), *arguments[2:]]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.mark.night
def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    """A reader would meet a page that is not there; so would one who has no network."""
    assert list(broken(site)) == []
    loaded = [
        link
        for path in site.rglob("*.html")
        for link in re.findall(r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="([^"]+)"', path.read_text())
    ]
    assert loaded
    assert [link for link in loaded if urlsplit(link).netloc] == []


@pytest.mark.night
def test_every_page_command_and_name_is_on_the_site(site: Path) -> None:
    """What is on no page is not found, and what a docstring says of it is not read."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert {page.relative_to(ROOT).with_suffix("") for page in pages} <= built
    ids = {one for path in (site / "docs/reference").glob("*.html") for one in Page(path).ids}
    assert {f"attnfuzz.{name}" for name in attnfuzz.__all__ if name != "__version__"} <= ids
    told = subprocess.run(
        [sys.executable, "-m", "attnfuzz", "--help"], capture_output=True, text=True, check=True
    ).stdout
    commands = re.findall(r"^  ([a-z]+) ", told.partition("Commands:")[2], re.MULTILINE)
    assert len(commands) > 10
    headings = re.findall(r"<h\d>([a-z]+)<", (site / "docs/reference/cli.html").read_text(encoding="utf-8"))
    assert set(commands) <= set(headings)


def runs(of: dict[str, Tensor]) -> dict[str, list[str]]:
    """Numbers that lie side by side, in the order of memory, of views ``[token, kv_head, dim]`` of positions in it."""
    found: list[tuple[str, int, int, list[int]]] = []
    places = sorted((int(view[at]), name, at) for name, view in of.items() for at in product(*map(range, view.shape)))
    for _, name, (token, head, dim) in places:
        if found and found[-1][:3] == (name, token, head) and found[-1][3][-1] == dim - 1:
            found[-1][3].append(dim)
        else:
            found.append((name, token, head, [dim]))
    said: dict[str, list[str]] = {}
    for name, token, head, dims in found:
        last = f"-{dims[-1]}" if len(dims) > 1 else ""
        said.setdefault(name, []).append(f"t{token} h{head} d{dims[0]}{last}")
    return said


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed", "interleaved"])
def test_layouts_are_drawn_as_they_are(layout: Layout) -> None:
    """Who writes a kernel after the drawing would read other tokens."""
    case = paged_case(num_q_heads=2, num_kv_heads=2, seq_lens=(2,), scale=1.0, block_size=2, layout=layout)
    start, caches = 0, []
    for name, spec in tensor_specs(case).items():
        if "cache" in name:
            size = torch.Size(spec.shape).numel()
            caches.append(torch.arange(start, start + size, dtype=torch.float64).view(spec.shape))
            start += size
    k, v = split_interleaved(caches[0]) if layout == "interleaved" else token_views(caches[0], caches[1], layout)
    true = runs({"K": k[0].flatten(2), "V": v[0]})
    page = (REFERENCE / "cases.md").read_text(encoding="utf-8")
    (drawn,) = re.findall(rf"^{layout} .*\n(?: .*\n)*", page, re.MULTILINE)
    lines = {name: text.split(" | ") for name, text in re.findall(r"\b([KV])  (.*)$", drawn, re.MULTILINE)}
    assert set(lines) == {"K", "V"}
    for name, blocks in lines.items():
        shown = [block.strip() for block in blocks]
        assert (shown[:-1] == true[name][: len(shown) - 1]) if shown[-1] == "..." else (shown == true[name])


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "defects").glob("*.json")), ids=lambda path: path.stem)
def test_a_saved_defect_names_nothing_of_the_machine_it_was_found_on(path: Path) -> None:
    """Its replay would look for a folder that only one machine has."""
    load_regression(path)
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert not any(Path(saved[name].partition(":")[0]).is_absolute() for name in ("problem", "kernel"))


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "defects").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_of_a_defect_is_short_and_needs_the_engine_and_torch_only(path: Path) -> None:
    """A maintainer would have to install attnfuzz, or to read much, to see a defect."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    compile(text, path.name, "exec")
    assert set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)) <= {"torch", path.stem.partition("-")[0]}
