"""Sources that a script needs, tensors as lines of code, and scripts in a report."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from attnfuzz.campaign.finding import Finding
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.report import html
from attnfuzz.report.html import Script, html_page, scripts_of
from attnfuzz.report.sources import definition_of, kernel_sources, only_what_it_needs
from attnfuzz.trials.as_code import UNPACK, definitions
from attnfuzz.verdict import Failure
from tests.common.report_results import PAGED, a_finding, a_result

MODULE = '''"""A docstring."""

from __future__ import annotations

import math
from os import path, sep

USED = 3
UNUSED = path


@staticmethod
def wanted(x: int) -> float:
    return math.sqrt(USED) + helper()


def helper() -> float:
    # a comment that stays
    return 1.0


def other() -> str:
    return sep


@declare(name="renamed")
def original() -> None: ...
'''


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_shaken_module_keeps_what_the_function_needs() -> None:
    """A script would be full of other kernels, or lack what its own one calls."""
    shaken = only_what_it_needs(MODULE, "wanted")
    compile(shaken, "shaken", "exec")
    for part in ("A docstring.", "import math", "USED = 3", "@staticmethod", "def helper", "# a comment that stays"):
        assert part in shaken
    for part in ("UNUSED", "other", "sep", "original"):
        assert part not in shaken


def test_definition_is_found_by_declared_name() -> None:
    """A kernel declared under another name than its function's would not be found."""
    assert definition_of(MODULE, "renamed") == "original"
    assert definition_of(MODULE, "helper") == "helper"
    with pytest.raises(LookupError, match="'missing'"):
        definition_of(MODULE, "missing")


def test_files_are_followed_but_not_imported(tmp_path: Path) -> None:
    """A neighbour would be missing from the script, or a kernel's module run in the driver."""
    files = {
        "kernels.py": "raise SystemExit\nimport tiles\nfrom deep.inner import thing\nimport torch, json",
        "tiles.py": "from deep import other",
        "deep/__init__.py": "",
        "deep/inner.py": "from .level import x\nfrom . import other",
        "deep/level.py": "x = 1",
        "deep/other.py": "",
    }
    write(tmp_path, files | {"unrelated.py": "", "deep/unrelated.py": ""})
    sources = kernel_sources(f"{tmp_path / 'kernels.py'}:my_kernel")
    assert (sources.entry, sources.attribute) == ("kernels.py", "my_kernel")
    assert sources.files == files


def test_module_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel in a package would not be found, or its relative imports be lost."""
    files = {"mine/__init__.py": "raise SystemExit", "mine/decode.py": "from .shared import x", "mine/shared.py": ""}
    write(tmp_path, files)
    monkeypatch.syspath_prepend(tmp_path)
    sources = kernel_sources("mine.decode:kernel")
    assert sources.entry == "mine/decode.py"
    assert sources.files == files


def test_bundled_kernel_brings_only_kernel_files() -> None:
    """The framework itself would be put into the script."""
    sources = kernel_sources("paged_naive")
    assert sources.entry == "attnfuzz/kernels/bundled.py"
    assert "attnfuzz/kernels/paged/paged_decode.py" in sources.files
    assert "attnfuzz/kernels/dense/dense_decode.py" not in sources.files
    assert all(name.startswith("attnfuzz/kernels/") for name in sources.files)


EAGER = Declaration(name="dense_eager", problem="dense_decode", target="dense_eager")
CASE = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(3,), scale=0.25)
WRONG = Failure(oracle="accuracy", kind="out:value", message="out is wrong")


def found(case: DenseDecodeCase = CASE, failure: Failure = WRONG) -> Finding:
    return Finding("0-1", EAGER, case, failure, 1.0, shrunk_s=2.0, failed=3, runs=3, path=Path("a.json"))


@pytest.mark.night
def test_scripts_are_made_where_that_is_possible(tmp_path: Path) -> None:
    """A kernel whose source is gone, or a case too large, would take the scripts of all others with it."""
    huge = msgspec.structs.replace(CASE, num_q_heads=64, num_kv_heads=64, seq_lens=(4096,))
    result = a_result(found(), a_finding(PAGED), found(huge))
    scripts = scripts_of(result)
    by_finding = dict(zip((EAGER.target, PAGED.target, "huge"), (scripts[0], scripts[2], scripts[1]), strict=True))
    assert "out is wrong" in by_finding[EAGER.target].text
    assert "cannot be read" in by_finding[PAGED.target].why_not
    assert "more than the" in by_finding["huge"].why_not
    assert by_finding[EAGER.target].text.splitlines()[2] in html_page(result, scripts)
    (tmp_path / "repro.py").write_text(by_finding[EAGER.target].text)
    run = subprocess.run([sys.executable, "repro.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "PASS" in run.stdout  # the kernel is right; the script ran


def test_what_no_script_shows_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that passes would be taken for the end of the bug; and Ctrl-C is not followed by a minute's work."""
    monkeypatch.setattr(html, "_script", lambda *_: Script(text="x"))
    relation = msgspec.structs.replace(WRONG, oracle="page_permutation")
    (script,) = scripts_of(a_result(found(failure=relation)))
    assert "compares runs on several inputs" in script.why_not
    (script,) = scripts_of(a_result(found(), stop_reason="interrupted"))
    assert "was interrupted" in script.why_not


def test_their_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a hundred megabytes opens nowhere."""
    texts = [Script(text="x" * 150_000)] * 40 + [Script(text="x" * 300_000)]
    made = iter(texts)
    monkeypatch.setattr(html, "_script", lambda *_: next(made))
    scripts = scripts_of(a_result(*(found() for _ in texts)))
    assert sum(len(script.text) for script in scripts) <= 4_000_000
    assert scripts[0].text
    assert scripts[-1].why_not == "a script of 300,000 characters is left out; attnfuzz repro writes it"


def test_what_goes_wrong_with_a_script_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of an hour's search would be lost to what adorns it."""

    def fails(*_: object, **__: object) -> str:
        raise RuntimeError("no room")

    monkeypatch.setattr("attnfuzz.report.repro.repro_script", fails)
    (script,) = scripts_of(a_result(found()))
    assert script.why_not == "no script could be made (no room); use attnfuzz replay"
    monkeypatch.setattr(html, "_SCRIPTS_S", 0.0)
    (script,) = scripts_of(a_result(found()))
    assert script.why_not.startswith("there was no time for a script")


def made_again(folder: Path, tensors: dict[str, Tensor]) -> tuple[dict[str, Any], list[str]]:
    """What the lines make, and the lines."""
    lines = definitions(tensors)
    script = folder / "script.py"
    script.write_text("\n".join(("import base64, zlib, torch", 'DEVICE = "cpu"', *UNPACK, *lines)))
    found = runpy.run_path(str(script))
    for name, tensor in tensors.items():
        assert found[name].stride() == tensor.stride()
        assert torch.equal(found[name], tensor)
    return found, lines


@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("names", [("k_cache", "v_cache"), ("v_cache", "k_cache")])
def test_views_of_one_tensor_are_views_of_one_again(pages: int, names: tuple[str, str], tmp_path: Path) -> None:
    """A kernel that finds V by its distance from K would pass in the script, or read nobody's memory."""
    cache = torch.arange(pages * 2 * 4 * 16, dtype=torch.float32).view(pages, 2, 4, 1, 16) % 251
    parts = {"k_cache": cache[:, 0], "v_cache": cache[:, 1]}
    found, _ = made_again(tmp_path, {name: parts[name] for name in names})
    k, v = found["k_cache"], found["v_cache"]
    assert v.data_ptr() - k.data_ptr() == cache[0, 0].nbytes
    assert k.untyped_storage().nbytes() == cache.nbytes


def test_what_lies_within_another_tensor_is_a_part_of_it_and_others_stand_alone(tmp_path: Path) -> None:
    """A script would have a tensor of all memory that a case was given, or a name that says nothing."""
    memory = torch.arange(512, dtype=torch.float32) % 31
    rows, other = memory[:256].view(16, 16), memory[384:].view(8, 16)
    found, lines = made_again(tmp_path, {"rows": rows, "values": rows[:, :8], "other": other})
    assert found["values"].data_ptr() == found["rows"].data_ptr()
    assert found["other"].untyped_storage().nbytes() == other.nbytes
    assert [line.split(" = ")[0] for line in lines if " = " in line] == ["rows", "values", "other"]
