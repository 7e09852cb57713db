"""attnfuzz.campaign.judge.journal: the case that took the machine down can be replayed afterwards."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from attnfuzz.campaign.judge.journal import Journal, JournalFolder, forget, was_running
from attnfuzz.corpus import encode_regression, load_regression
from attnfuzz.declaration import Declaration
from attnfuzz.own_files import LinkError
from attnfuzz.problems.cases import DenseDecodeCase

DECLARATION = Declaration(name="k", problem="dense_decode", target="kernels.py:k")


def a_case(seq_len: int) -> DenseDecodeCase:
    return DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(seq_len,) * seq_len, scale=0.25)


def left_over(parent: Path, name: str, *, cases: int = 1) -> Path:
    """The folder of a campaign that was killed while it judged so many cases."""
    folder = parent / name
    folder.mkdir(parents=True)
    journal = Journal(folder / "worker-0.json")
    journal.write(DECLARATION, [a_case(3)] * cases)
    journal.close()
    return folder


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


@pytest.mark.parametrize("end", ["well", "vanished", "lost"])
def test_the_folder_is_removed_when_all_went_well(end: str, tmp_path: Path) -> None:
    """Leftovers would be taken for a campaign that was cut off; or the case be lost with which a GPU was."""
    with JournalFolder(tmp_path / "state") as folder:
        assert folder.path is not None
        (folder.path / "worker-0.json").touch()
        folder.keep = end == "lost"
        if end == "vanished":  # the checkout was removed
            shutil.rmtree(tmp_path / "state")
    assert folder.path.exists() == (end == "lost")
    assert folder.left_over == []


def test_what_a_dead_campaign_left_is_named(tmp_path: Path) -> None:
    """After a machine went down, the next campaign has to say which case was running; not of one that still runs."""
    dead = left_over(tmp_path, "journal-999999999")
    (tmp_path / "journal-1").mkdir()  # of a campaign that was killed before its first case
    with JournalFolder(tmp_path) as alive, JournalFolder(tmp_path) as folder:
        assert folder.left_over == [dead]
        assert folder.path != alive.path
        folder.announced()
    with JournalFolder(tmp_path) as folder:
        assert folder.left_over == []  # said at each start, it is read at none
    assert load_regression(dead / "worker-0.json").case == a_case(3)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {dead.name, "journal-1"}


def test_cases_that_are_cleared_are_forgotten_and_at_last_the_folder(tmp_path: Path) -> None:
    """There would be no way to be rid of it but to guess that it may be deleted."""
    state = tmp_path / ".attnfuzz"
    dead = left_over(state, "journal-1", cases=2)
    files = sorted(dead.glob("*.json"))
    assert all(was_running(load_regression(file)) for file in files)
    with JournalFolder(state) as folder:
        folder.announced()
    forget(files[:1])
    assert sorted(dead.glob("*.json")) == files[1:]
    forget(files)
    assert not state.exists()


def test_a_copy_that_its_owner_keeps_elsewhere_stays(tmp_path: Path) -> None:
    """A replay of somebody's own file would delete it."""
    dead = left_over(tmp_path / ".attnfuzz", "journal-1")
    kept = tmp_path / "regressions" / "mine.json"
    kept.parent.mkdir()
    kept.write_bytes((dead / "worker-0.json").read_bytes())
    forget([kept])
    assert kept.exists()


def test_folders_and_files_of_a_user_are_left_alone(tmp_path: Path) -> None:
    """A folder called journal-issues, with notes and a stranger's case that passes, would be removed whole."""
    state = tmp_path / ".attnfuzz"
    issues = left_over(tmp_path, "journal-issues")  # not where campaigns keep theirs
    also = left_over(state, "journal-issues")  # not as they call theirs
    mixed = left_over(state, "journal-7")
    for folder in (issues, also, mixed):
        (folder / "pictures").mkdir()
        (folder / "notes.txt").write_text("mine")
    (mixed / "announced").touch()
    renamed = mixed / "my-case.json"
    renamed.write_bytes((mixed / "worker-0.json").read_bytes())
    noted = mixed / "worker-1.json"
    kept = msgspec.structs.replace(load_regression(renamed), note="to be looked at")
    noted.write_bytes(encode_regression(kept))
    (state / ".gitignore").write_text("*\n")
    forget([*issues.glob("*.json"), *also.glob("*.json"), *mixed.glob("*.json")])
    assert {path.name for path in issues.iterdir()} == {path.name for path in also.iterdir()}
    assert {path.name for path in issues.iterdir()} == {"notes.txt", "pictures", "worker-0.json"}
    assert {path.name for path in mixed.iterdir()} == {
        "notes.txt", "pictures", "announced", renamed.name, noted.name,
    }  # fmt: skip
    assert (state / ".gitignore").exists()


def test_a_folder_that_a_link_leads_to_is_not_touched(tmp_path: Path) -> None:
    """A link in a folder that was handed on would have the journal of another project removed."""
    other = left_over(tmp_path / "other" / ".attnfuzz", "journal-1")
    mine = tmp_path / ".attnfuzz"
    mine.mkdir()
    (mine / "journal-1").symlink_to(other)
    (tmp_path / "regressions").symlink_to(other)
    (mine / "journal-2").mkdir()
    (mine / "journal-2" / "worker-0.json").symlink_to(other / "worker-0.json")
    forget([mine / "journal-1" / "worker-0.json", tmp_path / "regressions" / "worker-0.json"])
    forget([mine / "journal-2" / "worker-0.json"])
    assert load_regression(other / "worker-0.json").case == a_case(3)
    assert {path.name for path in mine.iterdir()} == {"journal-1", "journal-2"}
    assert load_regression(mine / "journal-2" / "worker-0.json").case == a_case(3)


@pytest.mark.parametrize("name", [".gitignore", "journal-7", "journal-7/announced"])
@pytest.mark.parametrize("target", ["elsewhere", "elsewhere/notes", "elsewhere/nothing"])
def test_links_in_place_of_what_is_written_are_refused(tmp_path: Path, name: str, target: str) -> None:
    """A folder that was handed on would have files anywhere made and overwritten."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "notes").write_text("precious")
    (tmp_path / "state" / name).parent.mkdir(parents=True)
    (tmp_path / "state" / name).symlink_to(tmp_path / target)
    with pytest.raises(LinkError, match=f"{name}' is a symbolic link"), JournalFolder(tmp_path / "state") as folder:
        folder.announced()
    assert {path.name: path.read_text() for path in (tmp_path / "elsewhere").iterdir()} == {"notes": "precious"}
    assert [path for path in (tmp_path / "state").iterdir() if path.name == f"journal-{os.getpid()}"] == []


def test_a_user_s_own_gitignore_is_kept(tmp_path: Path) -> None:
    """What somebody wrote into the folder would be overwritten, or removed with it."""
    (tmp_path / ".gitignore").write_text("!state.json\n")
    with JournalFolder(tmp_path):
        pass
    assert (tmp_path / ".gitignore").read_text() == "!state.json\n"


def test_the_journal_of_a_live_campaign_is_not_taken_from_it(tmp_path: Path) -> None:
    """Replayed meanwhile, its cases pass; the one that takes the machine down next would be lost."""
    with JournalFolder(tmp_path / ".attnfuzz") as folder:
        assert folder.path is not None
        Journal(folder.path / "worker-0.json").write(DECLARATION, [a_case(1)])
        forget(folder.path.glob("*.json"))
        assert len(list(folder.path.glob("*.json"))) == 1


def test_a_dead_campaign_with_the_same_process_id_keeps_its_journal(tmp_path: Path) -> None:
    """In a container process IDs are the same each time: the case that took the last one down would be overwritten."""
    dead = left_over(tmp_path, f"journal-{os.getpid()}")
    with JournalFolder(tmp_path) as folder:
        assert folder.left_over == [dead]
    assert dead.exists()
