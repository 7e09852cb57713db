"""What the device's memory gives: the time of a copy within it, from memory and not from the L2 cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from attnfuzz.bench.kernels.graphs import GraphOfCalls
from attnfuzz.bench.kernels.messages import Timed
from attnfuzz.bench.kernels.timing import Stopwatch, calls_per_sample, time_samples

__all__ = ["time_copy"]

_TIMES_L2 = 4
_MOST_PAIRS = 2048
_PROBES = 5
_GRANULE = 4096
"""Bytes of which each buffer is a multiple: of lengths that are none, a copy takes up to a quarter longer."""


def time_copy(nbytes: int, device: str, stopwatch: Stopwatch, *, l2_bytes: int, seconds: float, on_gpu: bool) -> Timed:
    """Copies that read ``nbytes / 2`` and write as many, among enough buffers that none stays in the L2 cache.

    On a GPU in a graph, so that nothing but the device counts, and the faster of two ways: the driver's copy, which for
    some sizes takes a quarter longer than for others, and a kernel that reads and writes each word.
    """
    pairs = min(_MOST_PAIRS, max(1, -(-_TIMES_L2 * l2_bytes // nbytes)))
    words = -(-max(1, nbytes // 2) // _GRANULE) * _GRANULE // 4
    sources = [torch.empty(words, dtype=torch.int32, device=device).random_() for _ in range(pairs)]
    targets = [torch.empty_like(source) for source in sources]
    copies = [partial(target.copy_, source) for source, target in zip(sources, targets, strict=True)]
    if not on_gpu:
        return time_samples(copies[0], stopwatch, calls=1, seconds=seconds, l2="warm", mode="eager")
    passes = [partial(torch.bitwise_not, source, out=target) for source, target in zip(sources, targets, strict=True)]
    timed = [_in_graph(calls, stopwatch, seconds) for calls in (copies, passes)]
    return min(timed, key=lambda one: one.median_us)


def _in_graph(calls: Sequence[Callable[[], object]], stopwatch: Stopwatch, seconds: float) -> Timed:
    probe = GraphOfCalls(calls[:_PROBES], _PROBES)
    count = calls_per_sample(min(stopwatch(probe.replay, _PROBES)) / _PROBES, len(calls))
    probe.close()
    graph = GraphOfCalls(calls, count)
    try:
        return time_samples(graph.replay, stopwatch, calls=count, seconds=seconds, l2="cold", mode="graph")
    finally:
        graph.close()
