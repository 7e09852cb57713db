"""What README and docs/ show, run as it stands there; and their links."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from attnfuzz import check
from attnfuzz.corpus import Environment, FindingRecord, Regression, decode_regression, write_regression
from attnfuzz.problems.cases import PagedDecodeCase
from tests.common.in_process import attnfuzz
from tests.scripts import run_script

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "regressions").glob("*.md")]


def block(page: str, language: str, first_line: str = "") -> str:
    """The one block of ``language`` on ``page`` that starts with ``first_line``."""
    blocks: list[tuple[str, str]] = re.findall(
        r"```(\w+)\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL
    )
    (found,) = (text for name, text in blocks if name == language and text.startswith(first_line))
    return found


def headings(page: Path) -> set[str]:
    """What links to ``page`` may name behind a #."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the reader has typed in the kernel and its test."""
    for page, name in (("docs/first-finding.md", "my_decode.py"), ("docs/testing.md", "test_my_decode.py")):
        (tmp_path / name).write_text(block(page, "python", f"# {name}\n"), encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(block("docs/testing.md", "toml"), encoding="utf-8")
    return tmp_path


DROPS_A_TOKEN = """
import torch

import attnfuzz

torch.manual_seed(0)
scale, block_table = 0.125, torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
q = torch.randn(2, 2, 64, dtype=torch.float16)
k_cache, v_cache = torch.randn(2, 6, 16, 1, 64, dtype=torch.float16)
seq_lens = torch.tensor([9, 17], dtype=torch.int32)


def test_it():
    out, lse = torch.zeros_like(q), torch.zeros(2, 2)
    for i, length in enumerate((9, 16)):
        k, v = (part[block_table[i].long()].flatten(0, 1)[:length, 0].float() for part in (k_cache, v_cache))
        scores = q[i].float() @ k.T * scale
        out[i], lse[i] = scores.softmax(-1) @ v, scores.logsumexp(-1)
"""


def test_the_one_line_for_a_test_says_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has a suite would begin with a line that does not run, or says something else, below a page of our source."""
    line = block("docs/testing.md", "python", "attnfuzz.assert_close").replace("\n", "\n    ")
    (tmp_path / "test_it.py").write_text(f"{DROPS_A_TOKEN}    {line}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    run = run_script("import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'test_it.py']))")
    assert run.returncode == 1, run.stderr
    assert " ".join(block("docs/testing.md", "text", "AssertionError").split()) in " ".join(run.stdout.split())
    assert "closeness.py" not in run.stdout


def assert_script_says_what_is_shown(folder: Path, saved: Path) -> None:
    """The script stands alone: it is run where there is nothing else."""
    (folder / "elsewhere").mkdir()
    made = attnfuzz("repro", str(saved), "-o", "elsewhere/script.py", cwd=folder)
    assert made.returncode == 0, made.stderr
    command = [sys.executable, "-P", "script.py"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        command, cwd=folder / "elsewhere", env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert run.returncode == 1
    shown = block("docs/first-finding.md", "console", "$ attnfuzz repro").splitlines()[2:]
    versions, *_ = (line for line in run.stdout.splitlines() if line.startswith("torch "))
    shown = [versions if line.startswith("torch ") else line for line in shown]
    assert " ".join(shown).split() == run.stdout.split()


def assert_explanation_is_what_is_shown(folder: Path) -> None:
    """The picture, too. To be called when the kernel is repaired; it is as it was afterwards."""
    (folder / "heads.json").write_text(block("docs/first-finding.md", "json"), encoding="utf-8")
    kernel_file = folder / "my_decode.py"
    source = kernel_file.read_text(encoding="utf-8")
    assert source.count("head // group_size") == 1
    kernel_file.write_text(source.replace("head // group_size", "head % num_kv_heads"), encoding="utf-8")
    told = attnfuzz("explain", "heads.json", "-o", "weights.svg", cwd=folder).stdout
    kernel_file.write_text(source, encoding="utf-8")
    shown = block("docs/first-finding.md", "console", "$ attnfuzz explain").splitlines()[1:]
    assert [line for line in shown if line != "..." and line not in told.splitlines()] == []
    picture = ROOT / "docs" / "pictures" / "weights.svg"
    assert (folder / "weights.svg").read_text(encoding="utf-8") == picture.read_text(encoding="utf-8")


def first_finding(report: str) -> list[str]:
    """What a report tells of its first finding, whatever the machine."""
    found = report[report.index("\n1. ") :].partition("\n\n")[0]
    kept = [line for line in found.splitlines() if line and not re.match(r" +(#|\.\.\.)", line)]
    assert len(kept) >= 7
    return kept


def lines_that_are_missing(page: str, told: str) -> list[str]:
    """What ``page`` shows of the first search and ``told`` has not."""
    shown = block(page, "console", "$ attnfuzz explore").splitlines()
    return [line for line in shown if "..." not in line and line[0] != "$" and line.strip() not in told]


def findings_of_the_example(folder: Path) -> list[Path]:
    """What the search for its bug saves."""
    explored = attnfuzz("explore", "my_decode.py", "--budget", "60s", "--fail-fast", cwd=folder)
    assert explored.returncode == 1, explored.stderr
    saved = list((folder / "regressions").iterdir())  # another symptom may be on its way when the search ends
    assert [path.name for path in saved if "dead_memory" in path.name], saved
    return saved


@pytest.mark.night
def test_the_report_of_a_kernel_that_declares_nothing_is_what_its_command_prints(folder: Path) -> None:
    """A reader would compare what he is told with what an older version said."""
    shown = block("docs/contracts.md", "console", "$ attnfuzz explore my_decode.py --budget 40s")
    kernel_file = folder / "my_decode.py"
    source = kernel_file.read_text(encoding="utf-8")
    bare = re.sub(r"@attnfuzz.kernel\(.*?\n\)\n", '@attnfuzz.kernel("paged_decode")\n', source, flags=re.DOTALL)
    kernel_file.write_text(bare, encoding="utf-8")
    told = attnfuzz(*shown.splitlines()[0].removeprefix("$ attnfuzz ").split(), cwd=folder)
    assert told.returncode == 1, told.stderr
    assert [line for line in first_finding(shown) if line not in told.stdout.splitlines()] == []


def repair(kernel_file: Path) -> None:
    """Replace the line that the page says is wrong."""
    before, after = (
        re.search(rf"^\{sign}(.*)$", block("docs/first-finding.md", "diff"), re.MULTILINE) for sign in "-+"
    )
    assert before is not None
    assert after is not None
    source = kernel_file.read_text(encoding="utf-8")
    assert source.count(before[1]) == 1
    kernel_file.write_text(source.replace(before[1], after[1]), encoding="utf-8")


def test_a_launcher_with_another_signature_is_wrapped_as_shown(tmp_path: Path) -> None:
    """Who has a kernel already would copy a wrapper that does not run, or is accused of what it converts."""
    for name in ("attention_ops.py", "my_attention.py"):
        (tmp_path / name).write_text(block("docs/first-finding.md", "python", f"# {name}\n"), encoding="utf-8")
    (tmp_path / "pyproject.toml").touch()
    case = {
        "num_q_heads": 4, "num_kv_heads": 2, "head_size": 16, "block_size": 4, "seq_lens": [9, 0, 17], "scale": 0.25,
        "layout": "HND", "strides": {"q": "outer_gap"},
    }  # fmt: skip
    check(f"{tmp_path}/my_attention.py:my_attention", case, device="cpu")  # a test before may have left its executor


def test_the_flat_list_of_pages_is_that_of_the_block_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wraps a launcher with FlashInfer's arguments would hand it other pages, and be accused of them."""
    (tmp_path / "flat_pages.py").write_text(block("docs/first-finding.md", "python", "# flat_pages.py\n"))
    monkeypatch.syspath_prepend(tmp_path)
    flat_pages = importlib.import_module("flat_pages").flat_pages
    table, lens = torch.tensor([[3, 1, 9], [9, 9, 9], [2, 9, 9]]), torch.tensor([17, 0, 16], dtype=torch.int32)
    found = flat_pages(SimpleNamespace(block_table=table, seq_lens=lens, block_size=16))
    assert [part.tolist() for part in found] == [[0, 2, 2, 3], [3, 1, 2], [1, 0, 16]]


@pytest.mark.parametrize("processes", [True, False])
@pytest.mark.by_day("False")
def test_the_demo_finds_replays_and_repairs(
    processes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first thing that a reader tries would not work, or would show something else than the pages say."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "docs" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)

    def run(command: list[str], *, cwd: Path, env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
        started = len(demo.ATTNFUZZ)
        assert (command[:started], env["PYTHONPATH"], check) == (demo.ATTNFUZZ, str(ROOT), False)
        one = ("--workers", "1") if "explore" in command else ()  # others would only compute beside it
        done = attnfuzz(*command[started:], *one, cwd=cwd)
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
        return done

    if not processes:
        monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=run))
    assert demo.main(tmp_path / "demo") is None
    told, complaints = capfd.readouterr()
    assert complaints == ""
    for page in ("README.md", "docs/first-finding.md", "docs/index.md"):
        assert lines_that_are_missing(page, told) == []
    assert block("README.md", "python") in block("docs/first-finding.md", "python", "# my_decode.py")
    assert told.index("FAIL  ") < told.index("\nPASS  ") < told.index("\nNow yours")


@pytest.mark.night
def test_example_is_explained_and_kept_as_a_test(folder: Path) -> None:
    """Who reads on would be shown another script, another explanation, or a test that fails."""
    saved = findings_of_the_example(folder)
    assert_script_says_what_is_shown(folder, next(path for path in saved if "dead_memory" in path.name))
    repair(folder / "my_decode.py")
    assert_explanation_is_what_is_shown(folder)
    for path in saved:
        path.write_text(path.read_text(encoding="utf-8").replace('"open"', '"fixed"'), encoding="utf-8")
    (folder / "tests").mkdir()
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_decode.py", "regressions"],
        cwd=folder, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert tests.returncode == 0, tests.stdout


@pytest.mark.night
def test_a_backend_with_state_is_found_to_mix_up_calls(tmp_path: Path) -> None:
    """The page would promise what does not happen, or its repair would not be one."""
    source = block("docs/stateful.md", "python", "# my_backend.py")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "my_backend.py").write_text(source, encoding="utf-8")
    assert attnfuzz("explore", "my_backend.py", "--budget", "60s", "--fail-fast", cwd=tmp_path).returncode == 1
    saved = [decode_regression(path.read_bytes(), path.name) for path in (tmp_path / "regressions").iterdir()]
    assert any(one.preceding or one.finding.oracle == "call_sequence" for one in saved)
    before, after = (re.search(rf"^\{sign}(.*)$", block("docs/stateful.md", "diff"), re.MULTILINE) for sign in "-+")
    assert before is not None
    assert after is not None
    assert source.count(before[1]) == 1
    (tmp_path / "my_backend.py").write_text(source.replace(before[1], after[1]), encoding="utf-8")
    assert attnfuzz("replay", cwd=tmp_path).returncode == 0


@pytest.mark.night
def test_what_allclose_does_not_see_is_seen(tmp_path: Path) -> None:
    """The page that says why bounds are derived would show what does not happen."""
    (tmp_path / "it.py").write_text(block("docs/bounds.md", "python"), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "it.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
    )
    assert run.stdout == block("docs/bounds.md", "text")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_on_a_page_parses(page: Path) -> None:
    """What a reader pastes would be refused before it does anything."""
    text = page.read_text(encoding="utf-8")
    for language, shown in re.findall(r"^ *```(\w+)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        code = textwrap.dedent(shown)
        if language == "python":
            ast.parse(code)
        elif language == "sh":
            run = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=False, timeout=30)
            assert (run.returncode, run.stderr) == (0, "")


def test_regression_file_is_valid() -> None:
    """The format shown would be refused."""
    shown = block("docs/saved-cases.md", "json")
    assert decode_regression(shown.encode(), "saved-cases.md").status == "open"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """A reader would follow a link to a page, or a part of one, that is not there."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, part = link.partition("#")
        target = page.parent / name if name else page
        if not link.startswith(("http://", "https://")) and (
            not target.exists() or (part and part not in headings(target))
        ):
            broken.append(link)
    assert broken == []


def test_triage_prints_what_its_page_shows(tmp_path: Path) -> None:
    """Whoever works through a list would look for columns that are not there."""
    record, heads = FindingRecord(oracle="accuracy", kind="out:value", message="query head 1 reads KV head 1"), 4
    saved = Regression(
        problem="paged_decode",
        kernel="my_decode.py:my_decode",
        case=PagedDecodeCase(num_q_heads=heads, num_kv_heads=2, head_size=16, seq_lens=(1,), scale=0.25, block_size=16),
        finding=record,
        environment=Environment(date="2026-11-25"),
        issue="https://example.org/issues/12",
    )
    write_regression(saved, tmp_path / "regressions")
    record = FindingRecord(oracle="dead_memory", kind="out", message="it is nan where that holds NaN")
    write_regression(msgspec.structs.replace(saved, finding=record, status="fixed", issue=""), tmp_path / "regressions")
    told = re.sub(r"-\w{8}\.json", "", attnfuzz("triage", cwd=tmp_path).stdout)
    page = (ROOT / "docs" / "triage.md").read_text(encoding="utf-8")
    *_, shown = re.findall(r"```console\n\$ attnfuzz triage\n(.*?)```", page, re.DOTALL)
    assert told.split() == re.sub(r"-\w{8}\.json", "", shown).split()


def test_every_picture_is_shown() -> None:
    """A picture that no page shows is made again and again for nobody."""
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [path for path in (ROOT / "docs" / "pictures").iterdir() if f"pictures/{path.name}" not in pages] == []


@pytest.mark.night
def test_pictures_are_made_by_one_command(tmp_path: Path) -> None:
    """They would show what attnfuzz looked like once."""
    command = [sys.executable, str(ROOT / "docs" / "pictures.py"), str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=400, check=True)
    panel = (tmp_path / "panel.svg").read_text(encoding="utf-8")
    assert [
        word
        for word in ("confirmed", "dead_memory/out", "s&#160;left", "largest&#160;error/bound")
        if word not in panel
    ] == []
    pictures = ROOT / "docs" / "pictures"
    assert (tmp_path / "weights.svg").read_text() == (pictures / "weights.svg").read_text()
    made = {path.name for path in tmp_path.iterdir()}
    without_a_gpu = {path.name for path in pictures.iterdir() if not path.name.startswith("ladder-")}
    assert made | {"report.png"} == without_a_gpu


def test_modules_that_pages_name_exist() -> None:
    """A reader would look for a module that has moved."""
    named = {}
    for page in (ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "how-it-works.md"):
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]*)(?:\.py|\.[A-Za-z_.]+)?`", page.read_text(encoding="utf-8")):
            named[name] = page.name
    homes = (ROOT, ROOT / "attnfuzz")
    assert len(named) > 20
    assert not [
        (name, page)
        for name, page in named.items()
        if not any(
            (home / name).exists() or (home / f"{name}.py").exists() or (home / f"{name}.toml").exists()
            for home in homes
        )
    ]
