"""attnfuzz.campaign.saved.merging: one case of each bug is written, and nothing that people rely on is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnfuzz.campaign.saved.merging import PASSING, Checked, Kept, MergedFolder, Outcome, SavedBug
from attnfuzz.corpus import load_regression
from tests.unit.saved_findings import a_finding, save


def keep(folder: Path, bug: SavedBug, outcome: Outcome, file: int = 0) -> Kept:
    return MergedFolder(folder, device="a CPU").keep(bug, Checked(bug.files[file], outcome))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.json"))


def test_a_case_that_fails_is_written_and_its_source_left(tmp_path: Path) -> None:
    """The folders of the machines are the evidence; they are read, nothing else."""
    source = save(tmp_path / "node", a_finding(2, "seq_len>1", note="#12"))
    before = source.path.read_bytes()
    kept = keep(tmp_path / "out", SavedBug((source,)), "fails")
    assert kept == Kept(tmp_path / "out" / source.path.name, is_new=True)
    assert kept.path.read_bytes() == source.path.read_bytes() == before


def test_a_case_that_passes_is_put_aside_with_a_remark(tmp_path: Path) -> None:
    """Left among the others it would fail a test run that expects it to fail; deleted, a flaky bug would be lost."""
    source = save(tmp_path / "node", a_finding(2, "seq_len>1"))
    kept = keep(tmp_path / "out", SavedBug((source,)), "passes")
    assert kept.path.parent == tmp_path / "out" / PASSING
    assert "passed on a CPU when it was merged" in load_regression(kept.path).note
    assert names(tmp_path / "out") == []


def test_a_fixed_case_that_passes_stays(tmp_path: Path) -> None:
    """It is meant to pass."""
    source = save(tmp_path / "node", a_finding(2, status="fixed"))
    assert keep(tmp_path / "out", SavedBug((source,)), "passes").path.parent == tmp_path / "out"


def test_a_larger_case_in_the_folder_is_replaced_and_hands_its_note_on(tmp_path: Path) -> None:
    """Merging night after night would pile up cases of one bug."""
    smaller = save(tmp_path / "node", a_finding(2, "seq_len>1"))
    larger = save(tmp_path / "out", a_finding(9, "seq_len>1", note="tracked in #12"))
    kept = keep(tmp_path / "out", SavedBug((smaller, larger)), "fails")
    assert kept.replaced == (larger.path,)
    assert names(tmp_path / "out") == [smaller.path.name]
    assert load_regression(kept.path).note == "tracked in #12"


@pytest.mark.parametrize("outcome", ["unverified", "passes"])
def test_nothing_is_removed_for_a_case_that_was_not_seen_to_fail(tmp_path: Path, outcome: Outcome) -> None:
    """A case that was verified once would make room for one that may show nothing."""
    smaller = save(tmp_path / "node", a_finding(2, "seq_len>1"))
    larger = save(tmp_path / "out", a_finding(9, "seq_len>1"))
    kept = keep(tmp_path / "out", SavedBug((smaller, larger)), outcome)
    assert larger.path.exists()
    assert (kept.path == larger.path) == (outcome == "passes")


def test_what_the_folder_holds_is_left_as_it_is(tmp_path: Path) -> None:
    """Files under version control would change with every merge."""
    own = save(tmp_path / "out", a_finding(2, "seq_len>1", note="#12"))
    fixed = save(tmp_path / "out", a_finding(3, status="fixed"))
    other = save(tmp_path / "node", a_finding(9, "seq_len>1"))
    before = {path: path.read_bytes() for path in (own.path, fixed.path)}
    for _ in range(2):
        assert keep(tmp_path / "out", SavedBug((own, other)), "fails") == Kept(own.path, is_new=False)
        assert keep(tmp_path / "out", SavedBug((fixed,)), "fails") == Kept(fixed.path, is_new=False)
    assert {path: path.read_bytes() for path in (own.path, fixed.path)} == before
    assert len(names(tmp_path / "out")) == 2


def test_merging_twice_writes_nothing_new(tmp_path: Path) -> None:
    """A job that is run again must not be afraid of what it did before."""
    bug = SavedBug((save(tmp_path / "node", a_finding(2, "seq_len>1")),))
    assert [keep(tmp_path / "out", bug, "fails").is_new for _ in range(2)] == [True, False]
    assert [keep(tmp_path / "out", bug, "passes").is_new for _ in range(2)] == [True, False]
