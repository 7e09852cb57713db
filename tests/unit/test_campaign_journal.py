"""attnfuzz.campaign.journal: the case that took the machine down can be replayed afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attnfuzz.campaign.journal import Journal, JournalFolder
from attnfuzz.corpus import load_regression
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import DenseDecodeCase

DECLARATION = Declaration(name="k", problem="dense_decode", target="kernels.py:k")


def a_case(seq_len: int) -> DenseDecodeCase:
    return DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(seq_len,) * seq_len, scale=0.25)


def test_the_journal_holds_the_latest_case_as_a_regression(tmp_path: Path) -> None:
    """A journal that cannot be replayed, or that still holds the end of a longer case, names no culprit."""
    journal = Journal(tmp_path / "worker-0.json")
    for seq_len in (50, 2):
        journal.write(DECLARATION, a_case(seq_len))
        assert load_regression(tmp_path / "worker-0.json").case == a_case(seq_len)
    journal.close()
    assert load_regression(tmp_path / "worker-0.json").kernel == "kernels.py:k"


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only working directory must not keep anyone from searching."""
    monkeypatch.chdir(tmp_path)
    journal = Journal(None)
    journal.write(DECLARATION, a_case(1))
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_removed_when_all_went_well(tmp_path: Path) -> None:
    """Leftovers would be taken for a campaign that was cut off."""
    with JournalFolder(tmp_path / "state") as folder:
        assert folder.path is not None
        (folder.path / "worker-0.json").touch()
    assert not folder.path.exists()
    assert folder.left_over == []


def test_what_a_dead_campaign_left_is_named(tmp_path: Path) -> None:
    """After a machine went down, the next campaign has to say which case was running."""
    dead, alive = tmp_path / "journal-999999999", tmp_path / f"journal-{os.getppid()}"
    dead.mkdir()
    alive.mkdir()
    with JournalFolder(tmp_path) as folder:
        assert folder.left_over == [dead]
    assert dead.exists()
