"""attnfuzz.campaign.saved.saving: findings reach the disk at once, once, and nothing else there is touched."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.saved.saving import SaveFolder
from attnfuzz.campaign.saved.state import FALLBACK
from attnfuzz.corpus import Regression, load_regression, write_regression
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.verdict import Failure
from tests.common.named_features import named

KERNEL = Declaration(name="k", problem="dense_decode", target="kernels.py:k")
FAILURE = Failure(oracle="accuracy", kind="out:value", message="wrong")


def a_case(seq_len: int) -> DenseDecodeCase:
    return DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(seq_len,), scale=0.25)


def a_finding(seq_len: int, **fields: Any) -> Finding:
    return Finding(
        name="0-1",
        declaration=KERNEL,
        case=a_case(seq_len),
        failure=FAILURE,
        first_seen_s=1.0,
        failed=3,
        runs=3,
        **fields,
    )


class Folder:
    """A save folder with what it complained of."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        self.saver = SaveFolder(path, device="cpu", warn=self.warnings.append)

    def names(self) -> set[str]:
        return {path.name for path in self.path.iterdir()}


def saved(path: Path | None) -> Regression:
    assert path is not None
    return load_regression(path)


def earlier(folder: Path, seq_len: int, **changes: Any) -> Path:
    """A file that an earlier campaign left."""
    regression = a_finding(seq_len, features=named("seq_len>1")).regression("cpu")
    return write_regression(msgspec.structs.replace(regression, **changes), folder)


def test_a_smaller_case_replaces_the_finding_s_last_file(tmp_path: Path) -> None:
    """Every step of shrinking would otherwise leave a file behind."""
    folder = Folder(tmp_path)
    finding = a_finding(100)
    folder.saver.save(finding)
    first = finding.path
    finding.case = a_case(2)
    folder.saver.save(finding)
    assert finding.path != first
    assert saved(finding.path).case == a_case(2)
    assert len(folder.names()) == 1


def test_two_findings_in_one_file_do_not_remove_it_from_each_other(tmp_path: Path) -> None:
    """Two workers may shrink different cases to the same one, and then drop one of them."""
    folder = Folder(tmp_path)
    one, two = a_finding(5), a_finding(5)
    for finding in (one, two):
        folder.saver.save(finding)
    folder.saver.forget(two)
    assert saved(one.path).case == a_case(5)
    folder.saver.forget(one)
    assert folder.names() == set()


@pytest.mark.parametrize("was_there", [True, False])
def test_no_empty_folder_is_left_of_a_finding_that_is_none(tmp_path: Path, was_there: bool) -> None:
    """A campaign that finds nothing new would leave a folder behind, or take one away that is the user's."""
    path = tmp_path / "regressions"
    if was_there:
        path.mkdir()
    folder = Folder(path)
    for finding in (a_finding(5), a_finding(6)):
        folder.saver.save(finding)
        assert folder.names()
        folder.saver.forget(finding)
        assert path.exists() is was_there


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    """A folder of regressions is under version control and full of other people's work."""
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "README.md").write_text("text")
    fixed = earlier(tmp_path, 100, status="fixed", note="#12")
    folder = Folder(tmp_path)
    finding = a_finding(2, features=named("seq_len>1"), minimised=True)
    folder.saver.save(finding)
    assert folder.names() == {"notes.json", "README.md", fixed.name, finding.path.name if finding.path else ""}
    assert finding.known_as is None


def test_the_same_case_is_not_written_over(tmp_path: Path) -> None:
    """The file may hold a note, and "fixed" must stay what it says until someone looks."""
    path = earlier(tmp_path, 3, status="fixed", note="#12")
    before = path.read_bytes()
    finding = a_finding(3, features=named("seq_len>1"), minimised=True)
    Folder(tmp_path).saver.save(finding)
    assert (finding.path, finding.known_as) == (path, path)
    assert path.read_bytes() == before


def test_a_known_bug_in_a_smaller_case_is_not_saved_again(tmp_path: Path) -> None:
    """One bug, one file, however often it is found."""
    path = earlier(tmp_path, 2)
    folder = Folder(tmp_path)
    finding = a_finding(50, features=named("seq_len>1"), minimised=True)
    folder.saver.save(finding)
    assert finding.known_as == path
    assert folder.names() == {path.name}


def test_a_smaller_case_of_a_known_open_bug_takes_its_place_and_note(tmp_path: Path) -> None:
    """The smaller case is worth more, and what people wrote about the bug stays true."""
    path = earlier(tmp_path, 50, note="tracked in #12")
    folder = Folder(tmp_path)
    finding = a_finding(2, features=named("seq_len>1"), minimised=True)
    folder.saver.save(finding)
    assert finding.replaces == path
    assert folder.names() == {finding.path.name if finding.path else ""}
    assert saved(finding.path).note == "tracked in #12"


def test_nothing_is_replaced_before_shrinking_has_ended(tmp_path: Path) -> None:
    """Half-shrunk, the features say little; taking another bug's file away for them would lose that bug."""
    path = earlier(tmp_path, 50)
    folder = Folder(tmp_path)
    folder.saver.save(a_finding(2, features=named("seq_len>1")))
    assert path.exists()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with temporary files in a folder of their own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


def test_findings_go_elsewhere_while_their_folder_cannot_be_written(elsewhere: Path) -> None:
    """On a full disk, or in a folder that is read-only, they would only be printed, with a complaint each."""
    blocked = elsewhere / "blocked"
    blocked.touch()
    folder = Folder(blocked)
    findings = [a_finding(seq_len) for seq_len in (5, 2)]
    for finding in findings:
        folder.saver.save(finding)
        assert finding.path is not None
        assert finding.path.parent == FALLBACK
        assert saved(finding.path).case == finding.case
    (warning,) = folder.warnings
    assert all(words in warning for words in ("--save-dir", str(FALLBACK), str(blocked)))


def test_findings_move_to_their_folder_once_it_can_be_written(elsewhere: Path) -> None:
    """Found in the morning somewhere else, after the disk was full for a minute of the night."""
    (elsewhere / "blocked").touch()
    folder = Folder(elsewhere / "blocked")
    finding = a_finding(5)
    folder.saver.save(finding)
    (elsewhere / "blocked").unlink()
    folder.saver.save_if_missing(finding)
    assert folder.names() == {finding.path.name if finding.path else ""}
    assert list(FALLBACK.iterdir()) == []


def test_a_folder_that_vanished_is_made_again(tmp_path: Path) -> None:
    """Somebody cleans up while the campaign runs: what it found so far must not be gone at its end."""
    folder = Folder(tmp_path / "regressions")
    finding = a_finding(5)
    folder.saver.save(finding)
    shutil.rmtree(tmp_path / "regressions")
    folder.saver.save_if_missing(finding)
    assert saved(finding.path).case == a_case(5)


def test_without_the_working_directory_findings_go_to_the_temporary_folder(elsewhere: Path) -> None:
    """A checkout that is removed while the campaign runs takes the save folder and .attnfuzz with it."""
    (elsewhere / "gone").mkdir()
    os.chdir(elsewhere / "gone")
    folder = Folder(Path("regressions"))
    (elsewhere / "gone").rmdir()
    finding = a_finding(5)
    folder.saver.save(finding)
    assert finding.path is not None
    assert finding.path.is_relative_to(elsewhere / "tmp")
    assert str(finding.path.parent) in folder.warnings[0]


def test_where_nothing_can_be_written_that_is_said_once(elsewhere: Path) -> None:
    """The search goes on and findings are printed; a traceback would lose them."""
    for name in ("blocked", ".attnfuzz"):
        (elsewhere / name).touch()
    (elsewhere / "tmp").rmdir()
    folder = Folder(elsewhere / "blocked")
    for seq_len in (5, 2):
        finding = a_finding(seq_len)
        folder.saver.save(finding)
        assert finding.path is None
    (warning,) = folder.warnings
    assert "printed but not saved" in warning


@pytest.mark.parametrize(("failed", "runs", "words"), [(1, 3, "1 of 3"), (0, 0, "seen once"), (3, 3, "")])
def test_the_file_says_how_sure_the_finding_is(tmp_path: Path, failed: int, runs: int, words: str) -> None:
    """Whoever replays a flaky case and sees it pass has to know that this proves nothing."""
    finding = a_finding(2)
    finding.failed, finding.runs = failed, runs
    Folder(tmp_path).saver.save(finding)
    assert words in saved(finding.path).note
    assert bool(saved(finding.path).note) == bool(words)
