"""Times with a clock that the test sets."""

from __future__ import annotations

import itertools

import pytest

from attnfuzz.bench.kernels.timing import HostStopwatch, calls_per_sample, time_samples


class Machine:
    """Work that takes what the test says, on a clock that shows nothing else."""

    def __init__(self, *seconds: float) -> None:
        self.now = 0.0
        self.runs = 0
        self._seconds = itertools.cycle(seconds)

    def work(self) -> None:
        self.runs += 1
        self.now += next(self._seconds)

    def clock(self) -> float:
        return self.now


def test_a_time_is_the_median_of_one_call() -> None:
    """A slow outlier, or the number of calls in a sample, would show in the time."""
    machine = Machine(2e-3, 2e-3, 2e-3, 2e-3, 50e-3)
    timed = time_samples(machine.work, HostStopwatch(machine.clock), calls=4, seconds=0.2, l2="warm", mode="eager")
    assert timed.median_us == pytest.approx(500)
    assert timed.p10_us == pytest.approx(500)
    assert timed.p90_us > 10_000
    assert (timed.calls, timed.samples) == (4, 100)


def test_slow_calls_get_few_samples() -> None:
    """A kernel that takes seconds would hold everything else up for minutes."""
    machine = Machine(1.0)
    timed = time_samples(machine.work, HostStopwatch(machine.clock), calls=1, seconds=0.05, l2="warm", mode="eager")
    assert timed.samples == 3
    assert timed.median_us == pytest.approx(1e6)


@pytest.mark.parametrize(
    ("one_call_s", "sets", "calls"), [(1e-3, 1, 2), (10e-6, 1, 150), (10e-6, 12, 156), (1.0, 5, 5)]
)
def test_a_sample_lasts_long_enough_and_uses_all_sets_alike(one_call_s: float, sets: int, calls: int) -> None:
    """What surrounds a sample would count, or the cache would keep the sets that come twice."""
    assert calls_per_sample(one_call_s, sets) == calls
