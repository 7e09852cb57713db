"""Tensors that end or begin at unmapped memory, and limits on addresses."""

from __future__ import annotations

import gc
import mmap
import resource
import sys
from pathlib import Path

import pytest
import torch

from attnfuzz.isolation.memory_faults import FaultMap, read_regions
from attnfuzz.memory.address_space import SparseUnavailable, at_most_more, reserve, why_unavailable
from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.arena import violations
from attnfuzz.memory.guarded import GUARDS, Guard, GuardedArena, HostGuardedMemory, guarded_memory
from attnfuzz.memory.patterns import holds_prefill, poison_value
from tests.processes.host_virtual_memory import permissions

GAP = 1 << 20


def arena(guard: Guard = "end", memory: HostGuardedMemory | None = None) -> tuple[GuardedArena, bytearray]:
    noted = bytearray(1 << 14)
    memory = memory or HostGuardedMemory(gap_bytes=GAP)
    return GuardedArena(memory, FaultMap(memoryview(noted)), guard=guard, poison="nan", prefill="nan"), noted


@pytest.mark.parametrize(
    ("shape", "strides", "dtype"),
    [
        ((5, 3), (3, 1), torch.float16),
        ((5, 3), (7, 2), torch.bfloat16),
        ((2, 3, 1), (1, 4, 9), torch.float32),
        ((1,), (1,), torch.int32),
        ((33, 64, 5), (320, 5, 1), torch.float64),
    ],
)
def test_one_edge_is_at_unmapped_memory(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> None:
    """An access of one element too far would hit memory that is there, and go unnoticed."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) * dtype.itemsize
    for guard in GUARDS:
        made, noted = arena(guard)
        tensor = made.strided("t", shape, strides, dtype, role="input", shift=3)
        start = tensor.data_ptr()
        end = start + last + dtype.itemsize
        assert (tensor.shape, tensor.stride()) == (shape, strides)
        assert permissions(start).startswith("rw")
        assert permissions(end - 1).startswith("rw")
        edge, outside, farthest = (end, end, end + GAP - 1) if guard == "end" else (start, start - 1, start - GAP)
        assert edge % mmap.PAGESIZE == 0
        assert permissions(outside).startswith("---")
        assert permissions(farthest).startswith("---")
        (region,) = read_regions(bytes(noted))
        assert (region.start, region.end, region.shape) == (start, end, shape)
        assert (region.high - region.low - 2 * GAP) % mmap.PAGESIZE == 0
        assert region.low <= start - GAP
        assert region.high >= end + GAP


def test_tensors_hold_poison_and_prefill() -> None:
    """A kernel would find zeros, or another case's numbers, where an ordinary run holds poison."""
    memory = HostGuardedMemory(gap_bytes=GAP)
    for _ in range(2):  # the second time in memory that was used before
        made, _ = arena("end", memory)
        given = made.tensor("q", (3, 5), torch.float16, role="input")
        asked = made.tensor("out", (3, 5), torch.float16, role="output")
        assert given.isnan().all()
        assert holds_prefill(asked, "nan").all()
        given.fill_(1)
        asked.fill_(1)
    finite = GuardedArena(memory, FaultMap(memoryview(bytearray(999))), guard="end", poison="finite", prefill="finite")
    assert (finite.tensor("q", (3,), torch.float16, role="input") == poison_value(torch.float16, "finite")).all()


def test_empty_tensors_have_a_place() -> None:
    """A case without tokens would fail in the framework."""
    made, noted = arena()
    assert made.tensor("block_table", (2, 0), torch.int32, role="input").shape == (2, 0)
    (region,) = read_regions(bytes(noted))
    assert region.start == region.end


def test_stray_writes_inside_the_block_are_damage() -> None:
    """What an arena promises to its users would not hold for this one."""
    made, _ = arena("end")
    tensor = made.tensor("q", (3, 5), torch.float32, role="input")
    made.seal()
    assert not made.damage()
    tensor.as_strided((1,), (1,), tensor.storage_offset() - 2).zero_()
    (found,) = violations(made)
    assert (found.name, found.where, found.distance) == ("q", "before", 2)


def test_what_a_block_held_before_is_no_damage() -> None:
    """The rest of a large block, which is not part of the tensor, would be taken for a stray write."""
    memory = HostGuardedMemory(gap_bytes=GAP)
    memory.take((5 << 18) - 1).fill_(7)
    gc.collect()
    noted = FaultMap(memoryview(bytearray(1 << 14)))
    for guard in GUARDS:
        made = GuardedArena(memory, noted, guard=guard, poison="finite", prefill="finite")
        made.strided("workspace", ((1 << 20) + 5000,), (1,), torch.uint8, role="output")
        assert not made.damage()


def test_blocks_are_used_again_once_nothing_refers_to_them() -> None:
    """A run would map memory for each tensor anew, or hand out what a kernel keeps from an earlier call."""
    memory = HostGuardedMemory(gap_bytes=GAP)
    first = memory.take(100)
    address, kept = first.data_ptr(), first[:10].view(5, 2)
    del first
    gc.collect()
    assert memory.take(100).data_ptr() != address
    del kept
    gc.collect()
    assert address in (memory.take(4096).data_ptr(), memory.take(1).data_ptr())


def test_large_blocks_are_given_back_to_the_system() -> None:
    """An executor would hold the memory of the largest cases for good."""
    memory = HostGuardedMemory(gap_bytes=GAP, spare_bytes=1 << 14)
    address = memory.take(1 << 16).data_ptr()
    gc.collect()
    assert not permissions(address)


def test_impossible_sizes_are_refused_with_a_remedy() -> None:
    """A limit on address space would end a campaign with a bare number."""
    with pytest.raises(OSError, match=r"mmap of a guarded block .* failed: .*; raise the limit on address space"):
        HostGuardedMemory().take(1 << 60)


def test_buffers_of_which_nobody_could_tell_are_left_to_torch() -> None:
    """A kernel with thousands of small buffers would take as many mappings, and die where nobody can say of what."""
    noted = bytearray(1 << 13)
    fault_map = FaultMap(memoryview(noted))
    made = GuardedArena(HostGuardedMemory(gap_bytes=GAP), fault_map, guard="end", poison="nan", prefill="nan")
    with TrackedAllocations("cpu", poison="nan", prefill="nan", arena=made):
        buffers = [torch.zeros(3) for _ in range(200)]
    guarded = [one for one in buffers if (one.data_ptr() + one.nbytes) % mmap.PAGESIZE == 0]
    assert 10 < len(made.regions) < 150
    assert len(made.regions) == len(read_regions(bytes(noted))) <= len(guarded)
    assert all(bool((one == 0).all()) for one in buffers)


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """As in a process that has not asked yet."""
    guarded_memory.cache_clear()


def took_again() -> bool:
    memory = guarded_memory("cpu")
    address = memory.take(100).data_ptr()
    gc.collect()
    assert isinstance(memory, HostGuardedMemory)
    return bool(memory._spare[1 << 12]) and memory.take(100).data_ptr() == address


def test_blocks_are_kept_by_one_memory_for_all() -> None:
    """Each run would map its tensors anew."""
    assert guarded_memory("cpu") is guarded_memory("cpu")
    assert took_again()


def test_under_a_limit_on_addresses_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that nobody uses would take the addresses that a right kernel then lacks."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 36, resource.RLIM_INFINITY))
    assert not took_again()


def test_large_allocations_fail_within_and_succeed_afterwards() -> None:
    """A kernel that copies a sparse cache as a whole would take the machine's memory with it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with at_most_more(1 << 28):
        torch.empty(1 << 20)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(1 << 30)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    torch.empty(1 << 30)


def test_refusal_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where addresses count as memory, nobody would know why the oracle is silent."""
    assert why_unavailable() is None
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 32), hard))
    try:
        with pytest.raises(
            SparseUnavailable, match=r"no 64 GiB of addresses \(Cannot allocate memory\); allow it with"
        ):
            reserve(1 << 36)
        assert "ulimit -v unlimited" in (why_unavailable() or "")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert why_unavailable() == "sparse memory is implemented on Linux only, not on darwin"
