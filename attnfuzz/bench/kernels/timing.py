"""The time of one call: quantiles over samples, each of many calls in a row, by CUDA events or by a clock.

A sample must last long enough that what surrounds it is lost in it: events are recorded with a resolution of about half
a microsecond, and launching a graph takes a few. Samples are queued one behind the other without waiting, so the device
is never idle between them. In a CUDA graph, many calls cost the host one launch. The yardstick is the time of a copy
within the device's memory.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch

from attnfuzz.bench.kernels.shapes import L2State, Mode, Timed

_SAMPLE_S = 1.5e-3
_MOST_CALLS = 200
_LEAST_SAMPLES, _MOST_SAMPLES = 10, 100
_SLOW_S, _LEAST_OF_SLOW = 0.1, 3
_WARM_UPS = 2

_TIMES_L2 = 4
"""Size of all sets together, in L2 caches: the cache's replacement does not simply drop the oldest."""

MOST_SETS = 2048
PROBES = 5
"""Calls that tell how many make a sample."""

Run = Callable[[], object]

Stopwatch = Callable[[Run, int], list[float]]
"""Runs something several times; returns the seconds that each took."""


def host_stopwatch(run: Run, count: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Where nothing runs behind the host's back. ``clock`` gives seconds."""
    moments = [clock()]
    for _ in range(count):
        run()
        moments.append(clock())
    return [after - before for before, after in itertools.pairwise(moments)]


def cuda_stopwatch(run: Run, count: int) -> list[float]:
    """By events on the current stream: what the device waits for the host counts, what the host runs ahead does not."""
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


def sets_beyond(l2_bytes: int, nbytes: int) -> int:
    """How many sets of so many bytes make each be read from memory when its turn comes."""
    return max(1, -(-_TIMES_L2 * l2_bytes // nbytes))


def time_samples(run: Run, stopwatch: Stopwatch, *, calls: int, seconds: float, l2: L2State, mode: Mode) -> Timed:
    """Time ``run``, which makes ``calls`` calls, for about so many ``seconds``."""
    first = min(stopwatch(run, _WARM_UPS))
    least = _LEAST_SAMPLES if first < _SLOW_S else _LEAST_OF_SLOW
    count = min(_MOST_SAMPLES, max(least, round(seconds / max(first, 1e-6))))
    microseconds = [taken / calls * 1e6 for taken in stopwatch(run, count)]
    p10, *_, p90 = statistics.quantiles(microseconds, n=10, method="inclusive")
    median = statistics.median(microseconds)
    return Timed(l2=l2, mode=mode, median_us=median, p10_us=p10, p90_us=p90, samples=count, calls=calls)


_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Never freed: that might end the process (see ``attnfuzz.oracles.relations.graph_replay``)."""


class CaptureFailed(RuntimeError):  # noqa: N818 - says what happened
    """A call cannot be captured. The process should be left: torch's allocator counts the capture as under way."""


class GraphOfCalls:
    """Captures ``calls``, in turn, until there are ``count``. ``replay`` runs them all; ``close`` frees their memory.

    ``results``: what the first round of the calls returned; each replay writes it anew. Raises what a call raises
    before the capture, and CaptureFailed.
    """

    def __init__(self, calls: Sequence[Run], count: int) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self.results: list[object] = []
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch does not annotate it
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:  # on this stream for the first time: libraries allocate workspaces for each
                call()
            torch.cuda.synchronize()
            try:
                with torch.cuda.graph(self._graph, stream=side):
                    self._call(calls, count)
            except BaseException as error:  # of an interrupt, too, half a graph is left
                _ABANDONED.append(self._graph)
                if not isinstance(error, Exception):
                    raise
                raise CaptureFailed(f"cannot be captured: {error}") from error
        torch.cuda.current_stream().wait_stream(side)

    def _call(self, calls: Sequence[Run], count: int) -> None:
        for i in range(count):
            result = calls[i % len(calls)]()
            if i < len(calls):
                self.results.append(result)

    def replay(self) -> None:
        """Queue all calls on the current stream."""
        self._graph.replay()

    def close(self) -> None:
        """Give the memory of what was captured back."""
        torch.cuda.synchronize()
        self.results.clear()
        self._graph.reset()


def calls_in_graph(calls: Sequence[Run], stopwatch: Stopwatch) -> int:
    """How many calls make a graph that is a sample, each of ``calls`` as often as any other."""
    with closing(GraphOfCalls(calls[:PROBES], PROBES)) as probe:
        return calls_per_sample(min(stopwatch(probe.replay, PROBES)) / PROBES, len(calls))


_GRANULE = 4096
"""Bytes of which each buffer is a multiple: of lengths that are none, a copy may take longer."""

_SHIFTS = (0, 5 * _GRANULE, 77 * _GRANULE, 333 * _GRANULE)
"""Bytes by which targets begin later in their buffers: on an H100, some distances between source and target cost a copy
a fifth of its bandwidth. A copy is meant as a ceiling, so the best of these counts."""

_LEAST_SHIFTED = 1 << 22
"""Bytes of a buffer below which its place makes no difference that could be measured."""

_WORD = 4


def time_copy(nbytes: int, device: str, stopwatch: Stopwatch, *, l2_bytes: int, seconds: float, on_gpu: bool) -> Timed:
    """Copies that read ``nbytes / 2`` and write as many, among enough buffers that none stays in the L2 cache.

    On a GPU in a graph, so that nothing but the device counts, and the fastest of several ways: the driver's copy, and
    a kernel that reads and writes each word; each with targets at several distances from their sources.
    """
    pairs = min(MOST_SETS, sets_beyond(l2_bytes, nbytes))
    words = -(-max(1, nbytes // 2) // _GRANULE) * _GRANULE // _WORD
    shifts = _SHIFTS if words * _WORD >= _LEAST_SHIFTED else _SHIFTS[:1]
    sources = [torch.empty(words, dtype=torch.int32, device=device).random_() for _ in range(pairs)]
    rooms = [torch.empty(words + shifts[-1] // _WORD, dtype=torch.int32, device=device) for _ in range(pairs)]
    found: list[Timed] = []
    count = 0
    for shift in shifts:
        copies = [(source, room[shift // _WORD :][:words]) for source, room in zip(sources, rooms, strict=True)]
        by_driver = [partial(target.copy_, source) for source, target in copies]
        if not on_gpu:
            return time_samples(by_driver[0], stopwatch, calls=1, seconds=seconds, l2="warm", mode="eager")
        count = count or calls_in_graph(by_driver, stopwatch)
        for calls in (by_driver, [partial(torch.bitwise_not, source, out=target) for source, target in copies]):
            with closing(GraphOfCalls(calls, count)) as graph:
                timed = time_samples(graph.replay, stopwatch, calls=count, seconds=seconds, l2="cold", mode="graph")
            found.append(timed)
    return min(found, key=lambda one: one.median_us)
