"""What processes on one machine share: turns, claims on folders, and the time of each run of a call."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attnfuzz.isolation import progress
from attnfuzz.isolation.claims import Claim, PrivateFolder, is_claimed
from attnfuzz.isolation.progress import expect_runs, run_is_over
from attnfuzz.isolation.turns import Turns
from attnfuzz.judging.judge import judge
from attnfuzz.problems.cases import DenseDecodeCase
from tests.common.limited_kernels import sometimes_with_assembly as eager_kernel

_SOON_S = 20.0
_NOT_SOON_S = 0.2


class Forked:
    """A process that takes a turn and keeps it until it is killed."""

    def __init__(self, turns: Turns, at: str) -> None:
        self._told, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                with turns.turn(at):
                    os.write(tell, b"!")
                    signal.pause()
            finally:
                os._exit(1)
        os.close(tell)

    def has_turn(self, within_s: float) -> bool:
        return bool(select.select([self._told], [], [], within_s)[0]) and os.read(self._told, 1) == b"!"

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._told)


@pytest.fixture
def fork() -> Iterator[Callable[[Turns, str], Forked]]:
    started: list[Forked] = []

    def fork(turns: Turns, at: str) -> Forked:
        started.append(Forked(turns, at))
        return started[-1]

    yield fork
    for one in started:
        one.end()


def test_one_at_a_time(fork: Callable[[Turns, str], Forked]) -> None:
    """All processes of a campaign would start CUDA at once, and the first would be ready with the last."""
    turns = Turns()
    assert fork(turns, "a").has_turn(_SOON_S)
    assert not fork(turns, "a").has_turn(_NOT_SOON_S)


def test_gpus_have_turns_of_their_own(fork: Callable[[Turns, str], Forked]) -> None:
    """A GPU that does not answer would keep processes from all others."""
    turns = Turns()
    assert fork(turns, "a").has_turn(_SOON_S)
    assert fork(turns, "b").has_turn(_SOON_S)


def test_killed_process_leaves_its_turn() -> None:
    """One executor that is killed while it starts CUDA would end the campaign."""
    turns = Turns()
    first = Forked(turns, "a")
    assert first.has_turn(_SOON_S)
    second = Forked(turns, "a")
    first.end()
    assert second.has_turn(_SOON_S)
    second.end()


def test_turn_ends(fork: Callable[[Turns, str], Forked]) -> None:
    """A process that has started CUDA would keep the others waiting for as long as it runs."""
    turns = Turns()
    with turns.turn("a"):
        waiting = fork(turns, "a")
        assert not waiting.has_turn(_NOT_SOON_S)
    assert waiting.has_turn(_SOON_S)


SCRIPT = """
import os, pathlib, signal, sys
from attnfuzz.isolation.claims import PrivateFolder
folder = PrivateFolder(pathlib.Path(sys.argv[1]))
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def make_folder_and_end(parent: Path, how: str) -> list[Path]:
    subprocess.run([sys.executable, "-c", SCRIPT, parent, how], check=False)
    return list(parent.iterdir())


def test_a_claim_ends_with_its_release(tmp_path: Path) -> None:
    """A folder would be taken for that of a live process for ever, or never."""
    claim = Claim(tmp_path)
    assert is_claimed(tmp_path)
    claim.release()
    claim.release()
    assert not is_claimed(tmp_path)


def test_a_folder_goes_with_the_process(tmp_path: Path) -> None:
    """Each campaign would leave a folder behind."""
    assert make_folder_and_end(tmp_path, "ended") == []


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """The folder for temporary files would fill up with every kill; a live process must keep its own."""
    (left,) = make_folder_and_end(tmp_path, "killed")
    mine, young = PrivateFolder(tmp_path), PrivateFolder(tmp_path)
    assert left.exists()  # too young to be sure
    for folder in (left, mine.path):
        os.utime(folder, (0, 0))
    other = PrivateFolder(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {folder.path.name for folder in (mine, young, other)}


def test_other_folders_are_not_touched(tmp_path: Path) -> None:
    """Findings that could only be saved among temporary files would be lost."""
    names = ["attnfuzz-findings-1", "attnfuzz-run-notes", "attnfuzz-run-12345678"]  # the last may be read by others
    for name in names:
        (tmp_path / name).mkdir(mode=0o755)
        os.utime(tmp_path / name, (0, 0))
    PrivateFolder(tmp_path).remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


CASE = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(3, 2), scale=0.25, dtype="float32")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    found: list[int] = []
    monkeypatch.setattr(progress, "_LEAST_S", 0.0)
    expect_runs(lambda: found.append(os.getpid()))
    yield found
    expect_runs(None)


def test_runs_of_a_relation_are_told_one_by_one(told: list[int]) -> None:
    """All runs of a relation would share the time of one, and a slow kernel be told to hang."""
    assert judge(eager_kernel, CASE, device="cpu", relations=()).failure is None
    assert len(told) == 2
    assert judge(eager_kernel, CASE, device="cpu", relations="all").failure is None
    assert len(told) > 8


def test_only_long_runs_of_this_process_are_told(told: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The search would wake up for each of a thousand runs a second, or believe what a kernel's child says."""
    run_is_over()
    monkeypatch.setattr(progress, "_LEAST_S", 1e9)
    run_is_over()
    assert len(told) == 1
    monkeypatch.setattr(progress, "_LEAST_S", 0.0)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    run_is_over()
    assert len(told) == 1


def test_a_lost_channel_is_no_error_of_the_kernel() -> None:
    """A kernel would be told to raise what the loss of its process's channel raises."""

    def lost() -> None:
        raise BrokenPipeError

    expect_runs(lost)
    try:
        assert judge(eager_kernel, CASE, device="cpu", relations=()).failure is None
    finally:
        expect_runs(None)
