"""attnfuzz.isolation.turns: one process at a time, and none waits for one that is gone."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator

import pytest

from attnfuzz.isolation.turns import Turns

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
