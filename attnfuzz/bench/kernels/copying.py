"""What the device's memory gives: the time of a copy within it, from memory and not from the L2 cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from attnfuzz.bench.kernels.graphs import GraphOfCalls
from attnfuzz.bench.kernels.messages import Timed
from attnfuzz.bench.kernels.timing import Stopwatch, calls_per_sample, time_samples

__all__ = ["time_copy"]

_TIMES_L2 = 4
_MOST_PAIRS = 2048
_PROBES = 5
_GRANULE = 4096
"""Bytes of which each buffer is a multiple: of lengths that are none, a copy may take longer."""

_SHIFTS = (0, 5 * _GRANULE, 77 * _GRANULE, 333 * _GRANULE)
"""Bytes by which targets begin later in their buffers: on an H100, some distances between source and target cost a copy
a fifth of its bandwidth. A copy is meant as a ceiling, so the best of these counts."""

_LEAST_SHIFTED = 1 << 22
"""Bytes of a buffer below which its place makes no difference that could be measured."""

_WORD = 4

Call = Callable[[], object]


def time_copy(nbytes: int, device: str, stopwatch: Stopwatch, *, l2_bytes: int, seconds: float, on_gpu: bool) -> Timed:
    """Copies that read ``nbytes / 2`` and write as many, among enough buffers that none stays in the L2 cache.

    On a GPU in a graph, so that nothing but the device counts, and the fastest of several ways: the driver's copy, and
    a kernel that reads and writes each word; each with targets at several distances from their sources.
    """
    pairs = min(_MOST_PAIRS, max(1, -(-_TIMES_L2 * l2_bytes // nbytes)))
    words = -(-max(1, nbytes // 2) // _GRANULE) * _GRANULE // _WORD
    shifts = _SHIFTS if words * _WORD >= _LEAST_SHIFTED else _SHIFTS[:1]
    sources = [torch.empty(words, dtype=torch.int32, device=device).random_() for _ in range(pairs)]
    rooms = [torch.empty(words + shifts[-1] // _WORD, dtype=torch.int32, device=device) for _ in range(pairs)]
    ways = [way for shift in shifts for way in _ways(sources, [room[shift // _WORD :][:words] for room in rooms])]
    if not on_gpu:
        return time_samples(ways[0][0], stopwatch, calls=1, seconds=seconds, l2="warm", mode="eager")
    probe = GraphOfCalls(ways[0][:_PROBES], _PROBES)
    count = calls_per_sample(min(stopwatch(probe.replay, _PROBES)) / _PROBES, pairs)
    probe.close()
    return min((_in_graph(calls, count, stopwatch, seconds) for calls in ways), key=lambda one: one.median_us)


def _ways(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> list[list[Call]]:
    pairs = list(zip(sources, targets, strict=True))
    return [
        [partial(target.copy_, source) for source, target in pairs],
        [partial(torch.bitwise_not, source, out=target) for source, target in pairs],
    ]


def _in_graph(calls: Sequence[Call], count: int, stopwatch: Stopwatch, seconds: float) -> Timed:
    graph = GraphOfCalls(calls, count)
    try:
        return time_samples(graph.replay, stopwatch, calls=count, seconds=seconds, l2="cold", mode="graph")
    finally:
        graph.close()
