"""Times with a clock that the test sets, captured calls without a GPU, and what copies are timed on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnfuzz.bench.kernels import timing
from attnfuzz.bench.kernels.timing import HostStopwatch, calls_per_sample, time_copy, time_samples


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


@pytest.fixture
def abandoned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs that are never freed, of a GPU that does nothing."""
    for name in ("CUDAGraph", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: nullcontext())
    found: list[Any] = []
    monkeypatch.setattr(timing, "_ABANDONED", found)
    return found


@pytest.mark.parametrize(
    ("raised", "expected"), [(ValueError("no"), timing.CaptureFailed), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_what_a_call_raises_while_it_is_captured(
    raised: BaseException, expected: type[BaseException], abandoned: list[Any]
) -> None:
    """Whoever interrupts a benchmark would read that a kernel cannot be captured, or the process end in torch."""
    calls = iter([None, raised])

    def call() -> None:
        if (error := next(calls)) is not None:
            raise error

    with pytest.raises(expected):
        timing.GraphOfCalls([call], count=2)
    assert len(abandoned) == 1


L2_BYTES = 1 << 20


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[partial[Any]]]:
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

    monkeypatch.setattr(timing, "GraphOfCalls", Graph)
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


def test_the_fastest_way_counts(captured: list[Sequence[partial[Any]]]) -> None:
    """A kernel would reach more than a copy's bandwidth, where the driver's copy or the buffers' places are slow."""
    timed = time_copy(9 << 20, "cpu", stopwatch, l2_bytes=L2_BYTES, seconds=1e-2, on_gpu=True)
    assert timed.median_us * timed.calls == pytest.approx(375)
    offsets = {target_of(calls[0]).storage_offset() for calls in captured}
    assert len(offsets) == 4
    for calls in captured:
        target = target_of(calls[0])
        assert target.storage_offset() * 4 + target.nbytes <= target.untyped_storage().nbytes()
    captured.clear()
    timed = time_copy(3 << 18, "cpu", stopwatch, l2_bytes=L2_BYTES, seconds=1e-2, on_gpu=True)
    assert timed.median_us * timed.calls == pytest.approx(500)
    assert len(captured) == 3  # a probe, and each way with unshifted targets


def test_buffers_exceed_the_cache_and_are_whole_granules(captured: list[Sequence[partial[Any]]]) -> None:
    """The copy would come from the L2 cache, or be slowed down by a length that fits no granule."""
    nbytes = 100_001
    time_copy(nbytes, "cpu", stopwatch, l2_bytes=L2_BYTES, seconds=1e-2, on_gpu=True)
    sources = [call.args[0] for call in captured[1]]
    assert all(source.nbytes % 4096 == 0 and source.nbytes >= nbytes // 2 for source in sources)
    assert len({source.data_ptr() for source in sources}) == len(sources)
    assert 2 * sum(source.nbytes for source in sources) >= 4 * L2_BYTES
    assert not any(torch.equal(source, torch.zeros_like(source)) for source in sources)
