"""What the device's memory gives: the time of a copy within it, from memory and not from the L2 cache."""

from __future__ import annotations

import torch

from attnfuzz.bench.kernels.graphs import GraphOfCalls
from attnfuzz.bench.kernels.messages import Timed
from attnfuzz.bench.kernels.timing import Stopwatch, calls_per_sample, time_samples

__all__ = ["time_copy"]

_TIMES_L2 = 4
_MOST_PAIRS = 2048
_PROBES = 5


def time_copy(nbytes: int, device: str, stopwatch: Stopwatch, *, l2_bytes: int, seconds: float) -> Timed:
    """Copies that read ``nbytes / 2`` and write as many, among enough buffers that none stays in the L2 cache.

    On a GPU in a graph, so that nothing but the device counts.
    """
    pairs = min(_MOST_PAIRS, max(1, -(-_TIMES_L2 * l2_bytes // nbytes)))
    half = max(1, nbytes // 2)
    sources = [torch.ones(half, dtype=torch.uint8, device=device).random_(0, 255) for _ in range(pairs)]
    targets = [torch.empty_like(source) for source in sources]
    calls = [lambda i=i: targets[i].copy_(sources[i]) for i in range(pairs)]
    if device == "cpu":
        return time_samples(calls[0], stopwatch, calls=1, seconds=seconds, l2="warm", mode="eager")
    probe = GraphOfCalls(calls[:_PROBES], _PROBES)
    count = calls_per_sample(min(stopwatch(probe.replay, _PROBES)) / _PROBES, pairs)
    probe.close()
    graph = GraphOfCalls(calls, count)
    try:
        return time_samples(graph.replay, stopwatch, calls=count, seconds=seconds, l2="cold", mode="graph")
    finally:
        graph.close()
