"""attnfuzz merge, as installed: exit statuses, the table, and what lies where afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attnfuzz.corpus import regression_files
from tests.common.in_process import attnfuzz
from tests.common.planted_in_ci import KERNEL
from tests.common.saved_findings import a_finding, save

COMMAND = Path(sys.executable).with_name("attnfuzz")


def merge(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return attnfuzz("merge", *arguments, cwd=cwd)


def nodes_in(folder: Path) -> Path:
    """Two machines that found one bug each, and both a third, which has been repaired since."""
    (folder / "mine.py").write_text(KERNEL)
    save(folder / "node0", a_finding(9, "seq_len>1"))
    save(folder / "node1", a_finding(5, "seq_len>1"))
    for node in ("node0", "node1"):
        save(folder / node, a_finding(3, "dtype=float32", kind="lse:value"))
    return folder


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    return nodes_in(tmp_path)


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """What comes of these, of a fixed case that fails again, and of one whose kernel is elsewhere."""
    folder = nodes_in(tmp_path_factory.mktemp("merged"))
    save(folder / "node1", a_finding(6, "strides:q", status="fixed", note="#3"))
    save(folder / "node1", a_finding(7, "strides:k", kernel="theirs.py:theirs"))
    return folder, merge("node0", "node1", "-o", "all", cwd=folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.json"))}


def test_folders_are_merged_and_verified(merged: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """The result of a night on a cluster: one file for each bug that is there, the repaired ones put aside."""
    nodes, run = merged
    assert run.returncode == 1, run.stdout + run.stderr
    total = "6 files from 2 places: 3 bugs in all; 1 fails; 1 fails again; 1 not verified; put aside in all/passing, "
    assert run.stdout.splitlines()[-1].startswith(total + "passing now: 1")
    assert [len(contents(nodes / name)) for name in ("node0", "node1", "all/passing")] == [2, 4, 1]
    kept = {b'"seq_lens": [\n      5\n    ]' in data for data in contents(nodes / "all").values()}
    assert kept == {True, False}


@pytest.mark.night
def test_nothing_left_to_find_is_status_0(nodes: Path) -> None:
    """A script could not tell that all is well."""
    (nodes / "mine.py").write_text(KERNEL.replace("+= 1", "+= 0"))
    (nodes / "empty").mkdir()
    run = merge("node0", "node1", "empty", cwd=nodes)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 bugs in regressions" in run.stdout
    assert regression_files([nodes / "regressions"]) == []
    assert merge("empty", "-o", "none", cwd=nodes).returncode == 0


def test_without_running_anything(nodes: Path) -> None:
    """The machine that gathers the files may have neither the GPU nor the kernels."""
    (nodes / "mine.py").unlink()
    (nodes / "pyproject.toml").write_text('[tool.attnfuzz]\nregressions = "all"\n')
    run = merge("--no-verify", "node0", "node1", cwd=nodes)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "2 not verified; nothing was run" in run.stdout
    assert len(contents(nodes / "all")) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing argument"),
        (("node0", "node7"), "node7 does not exist"),
        (("node0", "node1", "-o", "node1"), "'node1' is where the result goes"),
        (("node0", "-o", "mine.py"), "'mine.py' is a file"),
        (("node0", "broken"), "a.json is not complete JSON"),
        (("node0", "-o", "mine.py/out"), "'mine.py/out' cannot be read or written (Not a directory)"),
    ],
)
def test_wrong_usage_is_one_sentence_and_changes_nothing(nodes: Path, arguments: tuple[str, ...], words: str) -> None:
    """An hour of somebody's findings must not depend on a correct command line."""
    (nodes / "broken").mkdir()
    (nodes / "broken" / "a.json").write_text("{")
    before = contents(nodes)
    run = merge(*arguments, "--no-verify", cwd=nodes)
    assert run.returncode == 2, run.stdout
    assert words in run.stderr
    assert run.stderr.count("\n") == 1
    assert contents(nodes) == before


def test_the_table_names_what_was_merged(merged: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """A maintainer reads the table before any file."""
    _, run = merged
    lines = run.stdout.splitlines()
    assert lines[0].split() == ["kernel", "finding", "files", "run", "here", "kept", "as"]
    assert any("accuracy/out:value [seq_len>1]" in line and " 2  fails " in line for line in lines)
    assert any("[strides:q] (fixed)" in line and "fails again" in line for line in lines)
    assert any("theirs.py:theirs" in line and "not verified" in line for line in lines)
    assert "no file 'theirs.py' here or above" in run.stdout
