"""attnfuzz.report.saved_cases: what was merged is told so that nobody has to look into the folders."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from attnfuzz.campaign.saved.merging import PASSING, Checked, Kept, Outcome, SavedBug
from attnfuzz.campaign.saved.replay import SavedCase
from attnfuzz.corpus.regression import Status
from attnfuzz.report.saved_cases import Merged, print_merged
from tests.unit.saved_findings import a_finding

OUT = Path("all")


def a_row(outcome: Outcome, *, status: Status = "open", reason: str = "", aside: bool = False) -> Merged:
    saved = SavedCase(Path("node1/file.json"), a_finding(2, "seq_len>1", status=status))
    kept = Kept(OUT / PASSING / "file.json" if aside else OUT / "file.json", is_new=True)
    return Merged(SavedBug((saved, saved)), Checked(saved, outcome, reason), kept)


def printed(*rows: Merged, verified: bool = True) -> str:
    file = io.StringIO()
    print_merged(Console(file=file, width=140), rows, files=4, folders=2, output=OUT, verified=verified)
    return file.getvalue()


@pytest.mark.parametrize(
    ("row", "counts", "words"),
    [
        (a_row("fails"), True, "fails"),
        (a_row("fails", status="fixed"), True, "fails again"),
        (a_row("unverified", reason="no GPU"), True, "file.json was not verified: no GPU"),
        (a_row("unverified", status="fixed"), False, "not verified"),
        (a_row("passes", aside=True), False, f"put aside in {OUT / PASSING}, passing now: 1"),
        (a_row("passes", status="fixed"), False, "1 case marked fixed"),
        (a_row("passes"), False, "once repaired: attnfuzz triage --fixed"),
    ],
)
def test_what_became_of_a_bug_is_said(row: Merged, counts: bool, words: str) -> None:
    """A bug would be lost between the table, the total and the exit status."""
    text = printed(row)
    assert row.counts == counts
    assert words in text
    assert f"4 files from 2 places: {'1 bug' if counts else '0 bugs'} in all" in text


def test_a_path_in_a_file_is_whole() -> None:
    """A path that is broken over two lines cannot be copied from a log."""
    row = a_row("fails")
    path = OUT / f"paged_decode-{'x' * 150}.json"
    assert str(path) in printed(Merged(row.bug, row.checked, Kept(path, is_new=True)))


def test_nothing_merged_is_said() -> None:
    """An empty table looks like a failure."""
    assert printed() == "4 files from 2 places: 0 bugs in all\n"


def test_it_is_said_that_nothing_was_run() -> None:
    """Unverified findings would be taken for bugs."""
    assert "merge again without --no-verify where the kernels run" in printed(a_row("unverified"), verified=False)
