"""The time of one call: quantiles over samples, each of many calls in a row, by CUDA events or by a clock.

A sample must last long enough that what surrounds it is lost in it: events are recorded with a resolution of about half
a microsecond, and launching a graph takes a few. Samples are queued one behind the other without waiting, so the device
is never idle between them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from attnfuzz.bench.kernels.messages import L2State, Mode, Timed

__all__ = ["CudaStopwatch", "HostStopwatch", "Stopwatch", "calls_per_sample", "quantiles", "time_samples"]

_SAMPLE_S = 1.5e-3
_MOST_CALLS = 200
_LEAST_SAMPLES, _MOST_SAMPLES = 10, 100
_SLOW_S, _LEAST_OF_SLOW = 0.1, 3
_WARM_UPS = 2

Run = Callable[[], object]


class Stopwatch(Protocol):
    """Runs something several times; returns the seconds that each took."""

    def __call__(self, run: Run, count: int) -> list[float]: ...


class HostStopwatch:
    """Where nothing runs behind the host's back. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def __call__(self, run: Run, count: int) -> list[float]:
        moments = [self._clock()]
        for _ in range(count):
            run()
            moments.append(self._clock())
        return _steps(moments)


class CudaStopwatch:
    """By events on the current stream: what the device waits for the host counts, what the host runs ahead does not."""

    def __call__(self, run: Run, count: int) -> list[float]:
        events: list[Any] = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not annotate it
            for _ in range(count + 1)
        ]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) * 1e-3 for before, after in itertools.pairwise(events)]


def calls_per_sample(one_call_s: float, multiple_of: int = 1) -> int:
    """How many calls make a sample that is long enough."""
    wanted = min(_MOST_CALLS, max(1, round(_SAMPLE_S / max(one_call_s, 1e-7))))
    return -(-wanted // multiple_of) * multiple_of


def time_samples(run: Run, stopwatch: Stopwatch, *, calls: int, seconds: float, l2: L2State, mode: Mode) -> Timed:
    """Time ``run``, which makes ``calls`` calls, for about so many ``seconds``."""
    first = min(stopwatch(run, _WARM_UPS))
    least = _LEAST_SAMPLES if first < _SLOW_S else _LEAST_OF_SLOW
    count = min(_MOST_SAMPLES, max(least, round(seconds / max(first, 1e-6))))
    p10, median, p90 = quantiles([taken / calls * 1e6 for taken in stopwatch(run, count)], (0.1, 0.5, 0.9))
    return Timed(l2=l2, mode=mode, median_us=median, p10_us=p10, p90_us=p90, samples=count, calls=calls)


def quantiles(numbers: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Of at least one number, interpolated linearly."""
    ordered = sorted(numbers)
    found = []
    for share in shares:
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        found.append(ordered[below] + (ordered[above] - ordered[below]) * (place - below))
    return found


def _steps(moments: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(moments)]
