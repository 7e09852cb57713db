"""The process that times kernels: what gets a time, and how it is taken."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from attnfuzz.bench.kernels import contender, timing
from attnfuzz.bench.kernels.contender import Contender
from attnfuzz.bench.kernels.service import TimingService
from attnfuzz.bench.kernels.shapes import MachineReply, MeasureReply, MeasureRequest, Shape
from attnfuzz.bench.kernels.timing import calls_per_sample, host_stopwatch, time_copy, time_samples
from attnfuzz.isolation.serve import ExitAfterReply
from attnfuzz.judging.messages import DeclarationsReply, DeclarationsRequest

KERNELS = str(Path(__file__).parent / "timed_kernels.py")
SHAPE = Shape(label="", num_q_heads=4, num_kv_heads=2, head_size=16, seq_lens=(40, 40), block_size=8)
SLOW_CLOCK = """
import time
import attnfuzz
from attnfuzz.kernels import eager

clock = time.perf_counter
time.perf_counter = lambda: clock() / 1000


@attnfuzz.kernel("paged_decode")
def mine(i):
    return eager.paged_decode(
        i.q, i.k_cache, i.v_cache, i.block_table, i.seq_lens, i.scale, i.block_size, i.layout
    )
"""
MERGE = Shape(label="", num_q_heads=2, head_size=16, num_tokens=5)


@pytest.fixture(scope="module")
def service() -> TimingService:
    return TimingService()


def measured(service: TimingService, target: str, shape: Shape, **options: int | str) -> MeasureReply:
    request = MeasureRequest(contender=target, shape=shape, options=dict(options), l2=("warm",), seconds=1e-3)
    return msgspec.json.decode(service.handle("measure", msgspec.json.encode(request)), type=MeasureReply)


@pytest.mark.parametrize(
    ("contender", "shape", "options"),
    [
        (f"{KERNELS}:right", SHAPE, {"num_splits": 2}),
        ("dense_eager", SHAPE, {}),
        ("merge_states_eager", MERGE, {}),
        ("merge_states_triton_th", MERGE, {"num_warps": 4}),
        ("torch:sdpa", SHAPE, {}),
        ("torch:sdpa", msgspec.structs.replace(SHAPE, seq_lens=(40, 39)), {}),
    ],
)
def test_what_is_right_gets_a_time(
    service: TimingService, contender: str, shape: Shape, options: dict[str, int | str]
) -> None:
    """Right kernels would be called wrong, or those on another layout of tensors or LSEs could not be timed."""
    reply = measured(service, contender, shape, **options)
    assert (reply.status, reply.note) == ("ok", "")
    (timed,) = reply.times
    assert timed.mode == "eager"
    assert timed.median_us > 0
    assert reply.error_ratio is not None
    assert reply.error_ratio <= 1


WINDOW = msgspec.structs.replace(SHAPE, window=8)
EIGHT_BITS = msgspec.structs.replace(SHAPE, kv_dtype="float8_e4m3fn")
MANY_QUERIES = msgspec.structs.replace(WINDOW, query_lens=(20, 1))


@pytest.mark.parametrize(
    ("contender", "shape", "status"),
    [
        ("paged_grouped_auto", WINDOW, "ok"),
        ("paged_attention_eager", MANY_QUERIES, "ok"),
        (f"{KERNELS}:ignores_the_window", WINDOW, "wrong"),
        (f"{KERNELS}:right", WINDOW, "unsupported"),
        ("paged_grouped_auto", EIGHT_BITS, "ok"),
        (f"{KERNELS}:right", EIGHT_BITS, "unsupported"),
        ("torch:sdpa", EIGHT_BITS, "unsupported"),
    ],
)
def test_windows_and_8_bit_caches_are_what_is_computed(
    service: TimingService, contender: str, shape: Shape, status: str
) -> None:
    """The time of plain attention would stand where that of a window or of an 8-bit cache is meant."""
    reply = measured(service, contender, shape)
    assert (reply.status, bool(reply.times)) == (status, status == "ok"), reply.note


LATENT = Shape(label="", num_q_heads=8, num_kv_heads=1, head_size=24, rank=16, seq_lens=(40, 40), block_size=8)
LISTS = msgspec.structs.replace(LATENT, head_size=96, rank=64, block_size=1)
SPARSE = "attnfuzz.families.sparse_decode_kernels:sparse_decode_eager"


@pytest.mark.parametrize(
    ("contender", "shape", "status"),
    [
        ("latent_eager", msgspec.structs.replace(LATENT, head_size=96, rank=64, seq_lens=(40, 33)), "ok"),
        ("latent_eager", LISTS, "ok"),
        (f"{KERNELS}:latent_values_with_positions", LATENT, "wrong"),
        (f"{KERNELS}:latent_values_with_positions", LISTS, "unsupported"),
        (SPARSE, LISTS, "ok"),
        (SPARSE, msgspec.structs.replace(LISTS, dtype="float32"), "unsupported"),
        (f"{KERNELS}:list_without_its_end", LISTS, "wrong"),
        (f"{KERNELS}:another_sparse_decode", LISTS, "unsupported"),
        (SPARSE, LATENT, "unsupported"),
        ("paged_eager", LATENT, "unsupported"),
    ],
)
def test_latent_vectors_and_lists_of_slots_are_what_is_computed(
    service: TimingService, contender: str, shape: Shape, status: str
) -> None:
    """A kernel that reads other keys or other values would have the time of a right one, or a right one none."""
    reply = measured(service, contender, shape)
    assert (reply.status, bool(reply.times)) == (status, status == "ok"), reply.note


@pytest.mark.parametrize("name", ["drops_the_last_key", "asks_another_question"])
def test_what_is_wrong_gets_no_time(service: TimingService, name: str) -> None:
    """A kernel would be fast by leaving work out, or by changing what it is compared with."""
    for _ in range(2):  # what it has changed is not what it is compared with the next time
        reply = measured(service, f"{KERNELS}:{name}", SHAPE)
        assert (reply.status, reply.times) == ("wrong", ())
        assert reply.error_ratio is not None
        assert reply.error_ratio > 1


def test_a_call_that_writes_nothing_gets_no_time(service: TimingService) -> None:
    """With one value of an option it would be right by what it left with another, and the fastest of all."""
    for choice, status in ((True, "ok"), (False, "wrong")):
        reply = measured(service, f"{KERNELS}:writes_only_if_told", SHAPE, writes=choice)
        assert reply.status == status


def test_a_kernel_that_replaces_the_clock_gets_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel would be as fast as it says."""
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)  # put back at the end
    (tmp_path / "slow_clock.py").write_text(SLOW_CLOCK)
    with pytest.raises(ExitAfterReply) as last:
        measured(TimingService(), f"{tmp_path / 'slow_clock.py'}:mine", SHAPE)
    reply = msgspec.json.decode(last.value.body, type=MeasureReply)
    assert (reply.status, reply.times) == ("failed", ())
    assert reply.note == "the kernel, or its module, has replaced time.perf_counter"


def test_what_raises_says_why(service: TimingService) -> None:
    """One kernel that cannot run would end the run of all others, or leave no trace."""
    reply = measured(service, f"{KERNELS}:raises", SHAPE)
    assert (reply.status, reply.note) == ("failed", "RuntimeError: no room for 8")


def test_what_attnfuzz_cannot_prepare_is_not_the_kernels_failure(
    service: TimingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right kernel would be called failing, and the run end with exit code 1, where memory for a shape runs out."""

    def no_room(*arguments: object, **named: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB\nand more")

    other = msgspec.structs.replace(SHAPE, seq_lens=(24, 24))  # nothing is drawn for it yet
    for name in ("draw", "right_rows"):
        with monkeypatch.context() as patch:
            patch.setattr(Contender, name, no_room)
            reply = measured(service, f"{KERNELS}:right", other, num_splits=2)
        assert (reply.status, reply.note) == (
            "unmeasured", "attnfuzz could not prepare or check it: OutOfMemoryError: tried to allocate 20 GiB"
        )  # fmt: skip
    assert measured(service, f"{KERNELS}:right", other, num_splits=2).status == "ok"


def test_what_is_only_compiled_is_called_and_not_checked(service: TimingService) -> None:
    """Right results would be worked out twice of all that is timed, by a dozen processes on one GPU at a time."""
    for name, status in (("drops_the_last_key", "ok"), ("raises", "failed")):
        request = MeasureRequest(contender=f"{KERNELS}:{name}", shape=SHAPE, l2=("warm",), modes=())
        reply = msgspec.json.decode(service.handle("measure", msgspec.json.encode(request)), type=MeasureReply)
        assert (reply.status, reply.times, reply.error_ratio) == (status, (), None)


def test_what_a_launch_did_is_the_kernels_failure(service: TimingService, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tells of a stray access when attnfuzz looks at the result: the kernel would not be blamed for it."""

    def lost(*arguments: object, **named: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(contender, "error_ratio", lost)
    monkeypatch.setattr(TimingService, "_device_answers", lambda self: False)
    with pytest.raises(ExitAfterReply) as ended:
        measured(service, f"{KERNELS}:right", SHAPE, num_splits=2)
    service._is_spoiled = False
    reply = msgspec.json.decode(ended.value.body, type=MeasureReply)
    assert reply.status == "failed"
    assert "illegal memory access" in reply.note


@pytest.mark.parametrize(
    ("contender", "shape", "why"),
    [
        (f"{KERNELS}:right", MERGE, "computes paged_decode"),
        ("torch:sdpa", MERGE, "computes dense_decode"),
        ("torch:sdpa", msgspec.structs.replace(SHAPE, room=90), "promises no graph for other lengths"),
    ],
)
def test_what_does_not_fit_is_no_failure(service: TimingService, contender: str, shape: Shape, why: str) -> None:
    """A table would be full of failures that are none."""
    reply = measured(service, contender, shape)
    assert (reply.status, reply.note) == ("unsupported", why)


def test_what_the_kernel_does_not_support_is_said(service: TimingService) -> None:
    """A kernel would be called with what it never promised to take, and then called wrong."""
    reply = measured(service, f"{KERNELS}:only_small_pages", SHAPE)
    assert (reply.status, reply.note) == ("unsupported", "block_size=8, but the kernel declares (1, 2)")


def test_what_is_too_small_has_no_cold_time(service: TimingService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time from the L2 cache would be called that from memory."""
    monkeypatch.setattr(service, "machine", msgspec.structs.replace(service.machine, l2_bytes=50 << 20))
    request = MeasureRequest(contender="merge_states_eager", shape=MERGE, l2=("cold",), seconds=1e-3)
    reply = msgspec.json.decode(service.handle("measure", msgspec.json.encode(request)), type=MeasureReply)
    assert reply.status == "unsupported"
    assert "too small" in reply.note


def test_it_tells_what_it_can_load(service: TimingService) -> None:
    """The driver would not know the kernels' options and problems."""
    payload = msgspec.json.encode(DeclarationsRequest([f"{KERNELS}:right", "paged_naive"]))
    reply = msgspec.json.decode(service.handle("declarations", payload), type=DeclarationsReply)
    assert [one.name for one in reply.kernels] == ["right", "paged_naive"]
    payload = msgspec.json.encode(DeclarationsRequest(["no_such_kernel"]))
    reply = msgspec.json.decode(service.handle("declarations", payload), type=DeclarationsReply)
    assert reply.error is not None


def test_it_tells_where_it_runs(service: TimingService) -> None:
    """Times of an interpreter would be shown as those of a GPU."""
    machine = msgspec.json.decode(service.handle("machine", b"{}"), type=MachineReply)
    assert machine.device == "cpu"
    assert machine.versions["torch"]


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
    timed = time_samples(
        machine.work, partial(host_stopwatch, clock=machine.clock), calls=4, seconds=0.2, l2="warm", mode="eager"
    )
    assert timed.median_us == pytest.approx(500)
    assert timed.p10_us == pytest.approx(500)
    assert timed.p90_us > 10_000
    assert (timed.calls, timed.samples) == (4, 100)


def test_slow_calls_get_few_samples() -> None:
    """A kernel that takes seconds would hold everything else up for minutes."""
    machine = Machine(1.0)
    timed = time_samples(
        machine.work, partial(host_stopwatch, clock=machine.clock), calls=1, seconds=0.05, l2="warm", mode="eager"
    )
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
