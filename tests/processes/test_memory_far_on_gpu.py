"""Guarded and far memory of a GPU, on a stand-in for its driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attnfuzz.isolation.memory_faults import FaultMap
from attnfuzz.memory import cuda_virtual
from attnfuzz.memory.arena import Arena
from attnfuzz.memory.cuda_virtual import CudaVirtualMemory, DriverError
from attnfuzz.memory.far import FAR, FarAllocator
from attnfuzz.memory.guarded import GUARDS, CudaGuardedMemory, Guard, GuardedArena
from attnfuzz.memory.sparse import CudaSparseMemory
from tests.processes.host_virtual_memory import GRANULE, HostVirtualMemory, permissions

GPU_GRANULE = 1 << 21  # of an H100


@pytest.fixture
def memory() -> Iterator[CudaSparseMemory]:
    host = HostVirtualMemory(GPU_GRANULE)
    yield CudaSparseMemory(host)
    host.give_back_everything()


def allocator(memory: CudaSparseMemory, **changes: Any) -> FarAllocator:
    return FarAllocator(Arena("cpu", poison="nan", prefill="nan"), on_gpu=memory, **changes)


def test_pages_begin_where_they_are_told_to(memory: CudaSparseMemory) -> None:
    """The case's tokens would lie at low ids after all, or short offsets read zeros."""
    first = FAR // 64
    made = allocator(memory, first_page=first)
    window = made.tensor("k_cache", (3, 4, 1, 16), torch.float16, strides="contiguous", role="input")
    cache = made.whole["k_cache"]
    assert cache.shape == (first + 3, 4, 1, 16)
    assert cache[first:].data_ptr() == window.data_ptr() == cache.data_ptr() + 2 * FAR
    assert window.isnan().all()
    assert len(set(cache[:3].flatten().tolist())) > 50
    assert cache[first // 2].abs().ge(0.5).all()
    assert permissions(cache.data_ptr() - 5 * GPU_GRANULE).startswith("---")


def test_decoys_below_the_cache_can_be_read(memory: CudaSparseMemory) -> None:
    """A negative offset of 32 bits would cost the context, and nobody could tell what it was."""
    first = FAR // 64 - (1 << 22)
    made = allocator(memory, first_page=first)
    made.tensor("v_cache", (3, 4, 1, 16), torch.float16, strides="contiguous", role="input")
    lands = (first * 64 + (1 << 31)) % (1 << 32) - (1 << 31)
    assert lands < 0
    assert permissions(made.whole["v_cache"].data_ptr() + 2 * lands).startswith("rw")


def test_a_mask_reaches_past_2_31_entries(memory: CudaSparseMemory) -> None:
    """Its entries would share memory on both sides of the limit, or a short offset cost the context."""
    first = (1 << 31) - 8
    made = allocator(memory, first_entry=first)
    window = made.tensor("mask", (12,), torch.uint8, strides="contiguous", role="input")
    window.copy_(torch.arange(12))
    mask = made.whole["mask"]
    assert window.tolist() == mask[first:].tolist() == list(range(12))
    assert mask[first // 2] == 0
    assert permissions(mask.data_ptr() - (1 << 31)).startswith("rw")


@pytest.mark.parametrize("kind", ["outer_gap", "transposed"])
def test_pages_end_with_the_cache(kind: Any, memory: CudaSparseMemory) -> None:
    """The gap behind the last page would be mapped behind the end of what is reserved: cuMemMap refuses that."""
    made = allocator(memory, first_page=77_673)
    window = made.tensor("k_cache", (9, 2, 144, 2, 128), torch.float16, strides=kind, role="input")
    window.fill_(1.0)
    assert window.eq(1.0).all()


@pytest.mark.by_day
@pytest.mark.parametrize("shape", [(5, 3, 16), (2, 7, 3), (3, 60, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_far_apart_do_not_overlap_and_take_no_more_than_together(
    shape: tuple[int, ...], axis: int, memory: CudaSparseMemory
) -> None:
    """Rows would overwrite each other; or a tensor of a few kilobytes take gigabytes."""
    made = allocator(memory, stretched={"out": axis})
    numbers = torch.arange(float(torch.Size(shape).numel())).view(shape)
    out = made.tensor("out", shape, torch.float32, strides="contiguous", role="output")
    out.copy_(numbers)
    assert torch.equal(out.clone(), numbers)
    assert (shape[axis] - 1) * out.stride(axis) >= 1 << 31
    assert len(memory._memory.created) == 4 + 1  # type: ignore[attr-defined]  # of the host's memory


def test_strides_within_a_page_can_be_wide(memory: CudaSparseMemory) -> None:
    """An offset within a page, in 32 bits, would be right on a GPU and wrong on a CPU."""
    made = allocator(memory, stretched={"k_cache": 1})
    cache = made.tensor("k_cache", (2, 4, 1, 16), torch.float16, strides="contiguous", role="input")
    assert 3 * cache.stride(1) >= FAR
    assert cache.stride(1) < FAR // 2
    assert cache.isnan().all()


def test_integers_have_zeros_around_them(memory: CudaSparseMemory) -> None:
    """A wrong entry would be a page id far outside of the cache, and every bug a lost context."""
    made = allocator(memory, stretched={"block_table": 0})
    table = made.tensor("block_table", (2, 3), torch.int32, strides="contiguous", role="input")
    assert table.eq(-1).all()
    assert table.as_strided((3,), (1,), table.stride(0) - (1 << 32)).eq(0).all()


@pytest.mark.by_day("3-dtype0", "200-dtype1")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [2, 3, 4, 5, 7, 9, 16, 33, 200])
def test_short_offsets_of_rows_come_out_at_other_numbers(
    rows: int, dtype: torch.dtype, memory: CudaSparseMemory
) -> None:
    """A wrong stride would be a lost context, of which nothing more can be told, or read the right numbers."""
    made = allocator(memory, stretched={"q": 0})
    q = made.tensor("q", (rows, 16), dtype, strides="contiguous", role="input")
    q.fill_(100.0)
    size = dtype.itemsize
    first, count = q.data_ptr(), 0
    for row in range(rows):
        for unit in (1, size):
            for low in (0, -(1 << 31)):
                here = ((row * q.stride(0) * unit - low) % (1 << 32) + low) // unit
                if here == row * q.stride(0):
                    continue
                count += 1
                if row < 9:
                    assert permissions(first + size * here).startswith("rw")
                found = bytearray(ctypes.string_at(first + size * here, size))
                assert torch.frombuffer(found, dtype=dtype).item() < 50
    assert count >= rows // 2


GAP = 4 * GRANULE


def guarded(guard: Guard, **changes: Any) -> GuardedArena:
    memory = CudaGuardedMemory(HostVirtualMemory(), gap_bytes=GAP)
    fault_map = FaultMap(memoryview(bytearray(1 << 14)))
    return GuardedArena(memory, fault_map, guard=guard, poison="nan", prefill="nan", **changes)


@pytest.mark.parametrize(("count", "padding"), [(8, 0), (13, 6), (1, 14), (100_000, 0)])
def test_tensors_are_aligned_and_end_or_begin_at_unmapped_memory(count: int, padding: int) -> None:
    """Loads of vectors would cost a correct kernel its context, or an access outside go unseen."""
    for guard in GUARDS:
        tensor = guarded(guard).strided("t", (count,), (1,), torch.float16, role="input", shift=3)
        start = tensor.data_ptr()
        assert start % 16 == 0
        edge = start + 2 * count + padding if guard == "end" else start - 1
        other = start - 1 if guard == "end" else start + 2 * count
        assert permissions(edge).startswith("---")
        assert permissions(start + 2 * count + padding - 1).startswith("rw")
        assert permissions(other).startswith("rw")  # so that it can be told which edge it was


@pytest.mark.parametrize("guard", GUARDS)
def test_room_is_poisoned_and_shows_what_is_written(guard: Guard) -> None:
    """The nearest element that a kernel wrote to could not be told."""
    arena = guarded(guard, room=64)
    arena.strided("t", (13,), (1,), torch.float16, role="output")
    (region,) = arena.regions
    room = arena.room_beside(region)
    assert room.numel() == (70 if guard == "end" else 64)
    assert room.eq(0xFF).all()
    edge = region.tensor.data_ptr() + (26 if guard == "end" else -1)
    assert room.data_ptr() == (edge if guard == "end" else edge + 1 - 64)


def test_unaligned_room_is_exact() -> None:
    """How far a kernel reads could be told to 16 bytes only."""
    for room in (2, 4, 30):
        arena = guarded("end", room=room, aligned=False)
        arena.strided("t", (13,), (1,), torch.float16, role="input")
        assert arena.room_beside(arena.regions[0]).numel() == room


def test_blocks_are_used_again_and_few_are_kept() -> None:
    """Sixteen processes would fill the GPU."""
    memory = HostVirtualMemory()
    made = CudaGuardedMemory(memory, gap_bytes=GAP, spare_bytes=8 * GRANULE)
    first = made.take(100)
    address, size = first.data_ptr(), first.numel()
    del first
    assert made.take(50).data_ptr() == address
    held = [made.take(20 * GRANULE) for _ in range(3)]
    assert memory.mapped == 3 * held[0].numel() + size
    held.clear()
    made.take(3 * GRANULE)
    assert made.spare_nbytes <= 8 * GRANULE + 4 * GRANULE
    assert not memory.created  # nothing but the mappings holds on to memory


NAMES = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 1: b"CUDA_ERROR_INVALID_VALUE"}


class Driver:
    """Answers each call with a result, and notes it."""

    def __init__(self, result: int = 0, *, context: int = 1) -> None:
        self.result = result
        self.context = context
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._answer(name, *arguments)

    def _answer(self, name: str, *arguments: Any) -> int:
        self.calls.append((name, *arguments))
        if name == "cuCtxGetCurrent":
            arguments[0]._obj.value = self.context
        elif name == "cuMemGetAllocationGranularity":
            arguments[0]._obj.value = 1 << 21
        elif name == "cuGetErrorName":
            arguments[1]._obj.value = NAMES.get(arguments[0])
        return self.result


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    pretended = Driver()
    monkeypatch.setattr(cuda_virtual, "_load", lambda: pretended)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return pretended


def test_structs_are_those_of_the_header() -> None:
    """The driver would read a flag where a device is meant. Offsets as a C compiler lays them out on x86-64."""
    properties = cuda_virtual._AllocationProperties
    fields = ("type", "requestedHandleTypes", "location", "win32HandleMetaData", "allocFlags")
    assert [getattr(properties, field).offset for field in fields] == [0, 4, 8, 16, 24]
    flags = ("compressionType", "gpuDirectRDMACapable", "usage", "reserved")
    assert [getattr(cuda_virtual._AllocationFlags, field).offset for field in flags] == [0, 1, 2, 4]
    assert ctypes.sizeof(properties) == 32
    assert (cuda_virtual._Access.flags.offset, ctypes.sizeof(cuda_virtual._Access)) == (8, 12)


def test_calls_name_the_device_and_how_it_may_use_the_memory(driver: Driver) -> None:
    """Memory would be that of another GPU, or not be accessible."""
    memory = CudaVirtualMemory(3)
    assert memory.granule == 1 << 21
    memory.map(1 << 30, 1 << 21, 7)
    memory.allow(1 << 30, 1 << 21)
    (mapped, allowed) = driver.calls[-2:]
    assert mapped == ("cuMemMap", 1 << 30, 1 << 21, 0, 7, 0)
    name, address, nbytes, access, count = allowed
    assert (name, address, nbytes, count) == ("cuMemSetAccess", 1 << 30, 1 << 21, 1)
    assert (access._obj.location.type, access._obj.location.id, access._obj.flags) == (1, 3, 3)


def test_what_the_driver_refuses_is_an_error_with_its_name(driver: Driver) -> None:
    """Memory that is not there would be used."""
    memory = CudaVirtualMemory(0)
    driver.result = 1
    with pytest.raises(DriverError, match="cuMemUnmap failed with CUDA_ERROR_INVALID_VALUE"):
        memory.unmap(1 << 30, 1 << 21)
    driver.result = 12345
    with pytest.raises(DriverError, match="cuMemRelease failed with error 12345"):
        memory.release(7)
    driver.result = 2
    with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY"):
        memory.create(1 << 21)


def test_a_thread_without_a_context_is_told_so(driver: Driver) -> None:
    """Each call would fail with an error that nobody can place."""
    driver.context = 0
    with pytest.raises(DriverError, match="no CUDA context is current"):
        CudaVirtualMemory(0)


def test_no_driver_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an old driver would end in a traceback of ctypes."""
    monkeypatch.setattr(cuda_virtual, "_LIBRARY", "libcuda-is-not-here.so")
    with pytest.raises(DriverError, match="has no virtual memory management"):
        cuda_virtual._load()
