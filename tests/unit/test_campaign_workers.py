"""attnfuzz.campaign.workers: workers that end are started again, at once or after a pause, and not for ever."""

from __future__ import annotations

import socket

import msgspec
import pytest

from attnfuzz.campaign.messages import Channel, FromWorker, Setup
from attnfuzz.campaign.workers import LastWords, Workers
from attnfuzz.oracles.verdict import DEFAULT_ORACLES


class Worker:
    """One that never says anything."""

    def __init__(self) -> None:
        mine, self.other = socket.socketpair()
        self.channel: Channel[FromWorker] = Channel(mine, msgspec.json.Decoder(FromWorker), patient=False)

    def stop(self) -> None:
        return

    def kill(self, *, grace_s: float = 0.0) -> LastWords:
        self.channel.close()
        self.other.close()
        return LastWords("")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def some_workers(size: int = 1, *, refuse: bool = False) -> tuple[Workers, Clock, list[Setup]]:
    """A workers, its clock and what its workers were started with."""
    setups: list[Setup] = []

    def launch(setup: Setup) -> Worker:
        setups.append(setup)
        if refuse:
            raise OSError("no more processes")
        return Worker()

    def setup_for(number: int, starts: int) -> Setup:
        return Setup(
            worker=number, num_workers=size, seed=starts, kernels=(), deadline=0.0, device="cpu",
            oracles=DEFAULT_ORACLES,
        )  # fmt: skip

    clock = Clock()
    return Workers(size, launch=launch, setup_for=setup_for, clock=clock), clock, setups


def deaths_until_given_up(workers: Workers, clock: Clock, *, killed: bool) -> int:
    for death in range(1, 100):
        clock.now += 100.0
        assert workers.start_due() == [0]
        workers.lose(0)
        if not workers.start_again(0, killed=killed):
            return death
    raise AssertionError("never given up")


@pytest.mark.parametrize(("killed", "deaths"), [(False, 4), (True, 25)])
def test_a_worker_that_gets_nowhere_is_given_up(killed: bool, deaths: int) -> None:
    """It would be started for ever; but whoever kills it may stop, which a bug does not."""
    workers, clock, setups = some_workers()
    assert deaths_until_given_up(workers, clock, killed=killed) == deaths
    assert workers.is_lost
    assert [setup.seed for setup in setups] == list(range(deaths))
    workers.close()


def test_a_worker_that_judges_cases_is_started_again_at_once_and_for_ever() -> None:
    """A campaign of days would slow down and end, if something kills a worker now and then."""
    workers, clock, _ = some_workers()
    for _ in range(50):
        assert workers.start_due() == [0]
        workers.has_judged(0)
        workers.lose(0)
        assert workers.start_again(0)
    assert clock.now == 0.0
    workers.close()


def test_starts_in_vain_are_spread_out() -> None:
    """Starting processes that die at once would take the machine's time from the others."""
    workers, clock, _ = some_workers()
    for _ in range(2):
        workers.start_due()
        workers.lose(0)
        workers.start_again(0)
    assert workers.start_due() == []
    clock.now += 60.0
    assert workers.start_due() == [0]
    workers.close()


def start_for_ever(workers: Workers, clock: Clock) -> None:
    while True:
        clock.now += 100.0
        workers.start_due()


def test_the_system_s_refusal_is_raised_once_nothing_is_left() -> None:
    """A machine out of processes would be waited for without a word."""
    workers, clock, setups = some_workers(size=2, refuse=True)
    with pytest.raises(OSError, match="no more processes"):
        start_for_ever(workers, clock)
    assert len(setups) > 2


def test_one_that_is_given_up_stays_away() -> None:
    """Workers of a GPU that does not answer would come back to it."""
    workers, _, _ = some_workers(size=2)
    assert workers.start_due() == [0, 1]
    assert workers.give_up(0)
    workers.lose(0)
    assert not workers.start_again(0, killed=True)
    assert (workers.working, workers.is_lost) == ([1], False)
    workers.close()
    assert workers.working == []
