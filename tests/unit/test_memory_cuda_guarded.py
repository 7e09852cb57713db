"""Guarded memory of a GPU, on virtual memory of the host in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnfuzz.isolation.memory_faults import FaultMap
from attnfuzz.memory.guarded import GUARDS, CudaGuardedMemory, Guard, GuardedArena
from tests.unit.host_virtual_memory import GRANULE, HostVirtualMemory, permissions

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
