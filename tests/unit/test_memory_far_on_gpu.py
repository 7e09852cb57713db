"""Live elements far away in a GPU's memory, which virtual memory of the host plays here."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attnfuzz.memory.arena import Arena
from attnfuzz.memory.far import FAR, FarAllocator
from attnfuzz.memory.sparse import CudaSparseMemory
from tests.unit.host_virtual_memory import HostVirtualMemory, permissions

GRANULE = 1 << 21  # of an H100


@pytest.fixture
def memory() -> Iterator[CudaSparseMemory]:
    host = HostVirtualMemory(GRANULE)
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
    assert permissions(cache.data_ptr() - 5 * GRANULE).startswith("---")


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
