"""attnfuzz.campaign.journal: the case that took the machine down can be replayed afterwards."""

from __future__ import annotations

import os
import shutil
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
        journal.write(DECLARATION, [a_case(seq_len)])
        assert load_regression(tmp_path / "worker-0.json").case == a_case(seq_len)
    journal.close()
    assert load_regression(tmp_path / "worker-0.json").kernel == "kernels.py:k"


def test_a_batch_is_in_as_many_files_as_it_has_cases(tmp_path: Path) -> None:
    """Any of the cases may be what took the machine down; one that was not running is a false trail."""
    journal = Journal(tmp_path / "worker-0.json")
    for count in (3, 1, 2):
        cases = [a_case(seq_len) for seq_len in range(1, count + 1)]
        journal.write(DECLARATION, cases)
        found = sorted(tmp_path.iterdir(), key=lambda path: (len(path.name), path.name))
        assert [load_regression(path).case for path in found] == cases


def test_files_of_a_worker_that_was_replaced_are_removed(tmp_path: Path) -> None:
    """They would pass for what the new worker was judging."""
    Journal(tmp_path / "worker-1.json").write(DECLARATION, [a_case(1), a_case(2), a_case(3)])
    others = tmp_path / "worker-11.json"
    others.touch()
    Journal(tmp_path / "worker-1.json").write(DECLARATION, [a_case(4)])
    assert sorted(tmp_path.iterdir()) == [tmp_path / "worker-1.json", others]


def test_a_full_disk_ends_the_journal_and_not_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases can be judged without a journal; a worker that died of one would take its findings with it."""

    def cut_short(descriptor: int, data: bytes, offset: int) -> int:
        return len(data) // 2

    monkeypatch.setattr(os, "pwrite", cut_short)
    journal = Journal(tmp_path / "worker-0.json")
    journal.write(DECLARATION, [a_case(1)])
    monkeypatch.undo()
    journal.write(DECLARATION, [a_case(1)])
    assert list(tmp_path.iterdir()) == []


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only working directory must not keep anyone from searching."""
    monkeypatch.chdir(tmp_path)
    journal = Journal(None)
    journal.write(DECLARATION, [a_case(1)])
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
    """After a machine went down, the next campaign has to say which case was running; not of one that still runs."""
    dead = tmp_path / "journal-999999999"
    dead.mkdir()
    with JournalFolder(tmp_path) as alive, JournalFolder(tmp_path) as folder:
        assert folder.left_over == [dead]
        assert folder.path != alive.path
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [dead.name]


def test_a_dead_campaign_with_the_same_process_id_keeps_its_journal(tmp_path: Path) -> None:
    """In a container process IDs are the same each time: the case that took the last one down would be overwritten."""
    dead = tmp_path / f"journal-{os.getpid()}"
    dead.mkdir()
    with JournalFolder(tmp_path) as folder:
        assert folder.left_over == [dead]
    assert dead.exists()


def test_a_folder_that_vanished_is_no_error(tmp_path: Path) -> None:
    """A campaign whose checkout was removed would end with a traceback instead of its result."""
    with JournalFolder(tmp_path / "state") as folder:
        shutil.rmtree(tmp_path / "state")
    assert folder.path is not None


def test_a_journal_that_is_needed_is_kept(tmp_path: Path) -> None:
    """It holds the case with which the GPU stopped answering."""
    with JournalFolder(tmp_path / "state") as folder:
        folder.keep = True
    assert folder.path is not None
    assert folder.path.is_dir()
