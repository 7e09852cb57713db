"""Symbolic links in a folder that was handed on: no command writes, makes or removes anything where they point."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.common.in_process import attnfuzz
from tests.common.saved_findings import a_finding, save


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """One to work in, beside a folder of somebody's."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "notes").write_text("precious")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "pyproject.toml").touch()
    return tmp_path / "project"


def elsewhere(project: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (project.parent / "elsewhere").iterdir()}


def link(project: Path, name: str, target: str) -> None:
    (project / name).parent.mkdir(parents=True, exist_ok=True)
    (project / name).symlink_to(project.parent / target)


@pytest.mark.parametrize(
    ("command", "name", "remedy"),
    [
        ("explore", ".attnfuzz", "remove it"),
        ("explore", ".attnfuzz/.gitignore", "remove it"),
        ("explore", ".attnfuzz/state.lock", "remove it"),
        ("explore", ".attnfuzz/state.json", "remove it"),
        ("explore", ".attnfuzz/findings", "remove it"),
        ("explore", ".attnfuzz/journal-7", "remove it"),
        ("explore", ".attnfuzz/journal-7/announced", "remove it"),
        ("explore", "regressions", "remove it, or name a folder with --save-dir"),
        ("ci", "attnfuzz-ci", "remove it, or name a folder with -o"),
        *(
            ("ci", f"attnfuzz-ci/{name}", "remove it, or name another folder with -o")
            for name in ("replay.json", "explore.json", "junit.xml", "report.html", "summary.md", "findings", "merged")
        ),
        ("merge", "regressions", "remove it, or name a folder with -o"),
    ],
)
@pytest.mark.parametrize("target", ["elsewhere", "elsewhere/notes", "elsewhere/nothing"])
def test_a_link_in_place_of_what_a_command_writes_is_refused(
    project: Path, command: str, name: str, remedy: str, target: str
) -> None:
    """A folder that was handed on would have files anywhere made, overwritten or removed."""
    link(project, name, target)
    given = project / "given"
    save(given, a_finding(3))
    arguments = {"explore": ("dense_naive", "--budget", "1s"), "ci": ("dense_naive",), "merge": (given,)}[command]
    run = attnfuzz(command, *arguments, cwd=project)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith(f"Error: '{name}' is a symbolic link, ")
    assert run.stderr.endswith(f"; {remedy}\n")
    assert elsewhere(project) == {"notes": "precious"}


def test_a_link_that_a_user_typed_is_followed(project: Path) -> None:
    """Who keeps saved cases on another disk could not merge into them."""
    link(project, "mine", "elsewhere")
    save(project / "given", a_finding(3))
    run = attnfuzz("merge", "given", "-o", "mine", "--no-verify", cwd=project)
    assert run.returncode == 1, run.stderr
    assert len(elsewhere(project)) == 2


@pytest.mark.night
def test_a_folder_of_a_user_is_not_removed_by_a_replay(project: Path) -> None:
    """Its name begins like one of a campaign's, and all of it would be gone: notes, folders, and the case itself."""
    saved = save(project / "journal-issues", a_finding(3, oracle="crash", kind="journal", kernel="dense_naive"))
    (project / "journal-issues" / "notes.txt").write_text("mine")
    run = attnfuzz("replay", "journal-issues", "--device", "cpu", cwd=project)
    assert run.returncode == 0, run.stderr
    assert {path.name for path in (project / "journal-issues").iterdir()} == {saved.path.name, "notes.txt"}
