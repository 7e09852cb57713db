"""The copy that kernels are set against, with a pretended CUDA graph that notes what it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from attnfuzz.bench.kernels import timing as copying
from attnfuzz.bench.kernels.timing import time_copy

L2_BYTES = 1 << 20


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[partial[Any]]]:
    captured: list[Sequence[partial[Any]]] = []

    class Graph:
        def __init__(self, calls: Sequence[partial[Any]], count: int) -> None:
            captured.append(calls)
            self.calls = calls
            del count

        def replay(self) -> None:
            for call in self.calls:
                call()

        def close(self) -> None:
            pass

    monkeypatch.setattr(copying, "GraphOfCalls", Graph)
    return captured


def target_of(call: partial[Any]) -> torch.Tensor:
    found = call.keywords["out"] if call.keywords else call.func.__self__  # type: ignore[attr-defined]  # a method
    assert isinstance(found, torch.Tensor)
    return found


def stopwatch(run: Callable[[], object], count: int) -> list[float]:
    """A kernel takes half of the driver's copy, which takes a quarter less with a target that is shifted."""
    run()
    call = run.__self__.calls[0]  # type: ignore[attr-defined]  # a bound method of the pretended graph
    slow = not call.keywords
    return [(1e-3 if slow else 0.5e-3) * (0.75 if target_of(call).storage_offset() else 1.0)] * count


def test_the_fastest_way_counts(graphs: list[Sequence[partial[Any]]]) -> None:
    """A kernel would reach more than a copy's bandwidth, where the driver's copy or the buffers' places are slow."""
    timed = time_copy(9 << 20, "cpu", stopwatch, l2_bytes=L2_BYTES, seconds=1e-2, on_gpu=True)
    assert timed.median_us * timed.calls == pytest.approx(375)
    offsets = {target_of(calls[0]).storage_offset() for calls in graphs}
    assert len(offsets) == 4
    for calls in graphs:
        target = target_of(calls[0])
        assert target.storage_offset() * 4 + target.nbytes <= target.untyped_storage().nbytes()
    graphs.clear()
    timed = time_copy(3 << 18, "cpu", stopwatch, l2_bytes=L2_BYTES, seconds=1e-2, on_gpu=True)
    assert timed.median_us * timed.calls == pytest.approx(500)
    assert len(graphs) == 3  # a probe, and each way with unshifted targets


def test_buffers_exceed_the_cache_and_are_whole_granules(graphs: list[Sequence[partial[Any]]]) -> None:
    """The copy would come from the L2 cache, or be slowed down by a length that fits no granule."""
    nbytes = 100_001
    time_copy(nbytes, "cpu", stopwatch, l2_bytes=L2_BYTES, seconds=1e-2, on_gpu=True)
    sources = [call.args[0] for call in graphs[1]]
    assert all(source.nbytes % 4096 == 0 and source.nbytes >= nbytes // 2 for source in sources)
    assert len({source.data_ptr() for source in sources}) == len(sources)
    assert 2 * sum(source.nbytes for source in sources) >= 4 * L2_BYTES
    assert not any(torch.equal(source, torch.zeros_like(source)) for source in sources)
