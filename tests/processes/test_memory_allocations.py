"""Buffers that a kernel allocates, and those that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.memory import allocations as workspaces
from attnfuzz.memory.allocations import TrackedAllocations, WorkspacePool
from attnfuzz.memory.arena import violations
from attnfuzz.memory.image import Fetch
from attnfuzz.memory.kept import _MOST_NBYTES, KeptBuffers
from attnfuzz.memory.patterns import Fill, holds_prefill, prefill_

LIKE = torch.zeros(3, 4)


def tracked() -> TrackedAllocations:
    return TrackedAllocations("cpu", poison="nan", prefill="nan")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, 4),
        lambda: torch.empty((3, 4), dtype=torch.int32),
        lambda: torch.empty_like(LIKE),
        lambda: LIKE.new_empty(3, 4),
        lambda: LIKE.new_empty((3, 4), dtype=torch.float16),
        lambda: torch.empty_strided((3, 4), (8, 2)),
        lambda: LIKE.new_empty_strided((3, 4), (1, 3)),
    ],
)
def test_uninitialised_buffers_hold_prefill(make: Callable[[], Tensor]) -> None:
    """A kernel that reads its workspace before writing it would see zeros by luck."""
    plain = make()
    with tracked():
        buffer = make()
    assert holds_prefill(buffer, "nan").all()
    assert (buffer.shape, buffer.stride(), buffer.dtype) == (plain.shape, plain.stride(), plain.dtype)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, 4),
        lambda: torch.ones(3, 4, dtype=torch.int64),
        lambda: torch.full((3, 4), -torch.inf),
        lambda: torch.zeros_like(LIKE, dtype=torch.bool),
        lambda: torch.full_like(LIKE, 2.0),
        lambda: torch.ones_like(LIKE),
        lambda: LIKE.new_zeros(3, 4),
        lambda: LIKE.new_full((3, 4), 3.0),
        lambda: LIKE.new_ones(3, 4),
    ],
)
def test_initialised_buffers_hold_their_value(make: Callable[[], Tensor]) -> None:
    """`torch.zeros` inside a kernel would not be zero, or would not be guarded."""
    memory = tracked()
    with memory:
        buffer = make()
    assert torch.equal(buffer, make())
    assert len(memory.arena.regions) == 1


def test_renamed_buffer_is_reported_by_its_name() -> None:
    """A returned output would be called a workspace."""
    memory = tracked()
    with memory:
        buffer = torch.empty(3, 5)
    memory.arena.rename(buffer, "out")
    buffer.as_strided((1,), (1,), buffer.storage_offset() - 1).fill_(1)
    assert [(found.name, found.where) for found in violations(memory.arena)] == [("out", "before")]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(0),
        lambda: torch.empty_strided((3, 4), (0, 1)),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.zeros(3, dtype=torch.complex128),
        lambda: torch.zeros(3, 3).to_sparse(),
    ],
)
def test_what_cannot_be_guarded_is_left_alone(make: Callable[[], Tensor]) -> None:
    """An unusual allocation would fail under the tracker."""
    with tracked():
        assert make().shape == make().shape


def test_huge_buffers_are_left_alone() -> None:
    """Triton's autotuner, which allocates 256 MiB, would double the memory and time of a run."""
    memory = tracked()
    with memory:
        torch.empty(300 << 20, dtype=torch.uint8)
        torch.empty(4)
    assert len(memory.arena.regions) == 1


def test_nothing_is_tracked_outside() -> None:
    """Allocations of the framework itself would be pre-filled and kept."""
    memory = tracked()
    with memory:
        pass
    torch.empty(4)
    assert memory.arena.regions == []
    assert memory.arena.nbytes == 0


def test_undefined_tensors_of_a_list_are_handed_on_as_empty_ones() -> None:
    """FlashAttention 3 returns no buffers of splits that it did not make, and would be told to raise RuntimeError."""
    made = torch.ones(3)
    memory = tracked()
    returned = memory.__torch_dispatch__(lambda: [made, None], ())
    assert returned[0] is made
    assert returned[1].numel() == 0


def allocations(pool: WorkspacePool) -> TrackedAllocations:
    return TrackedAllocations("cpu", poison=pool.poison, prefill=pool.poison, source=pool.take)


def test_runs_get_memory_of_their_own() -> None:
    """Two runs would write to the same workspace, and differ from what they do alone."""
    pool = WorkspacePool("cpu", "nan")
    found, arenas = [], []
    for value in range(3):
        with allocations(pool) as active:
            found.append(torch.empty(5, 7).fill_(value))
        arenas.append(active.arena)
    assert [int(tensor.max()) for tensor in found] == [0, 1, 2]
    assert pool.is_whole(arenas, Fetch())
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1


def test_overrun_is_located_in_its_run() -> None:
    """A write past a workspace would be blamed on another run."""
    pool = WorkspacePool("cpu", "finite")
    first, second = allocations(pool), allocations(pool)
    with first:
        buffer = torch.empty(4)
    with second:
        torch.empty(4)
    buffer.as_strided((1,), (1,), buffer.storage_offset() + 5).fill_(1.0)
    assert first.arena.damage()
    assert not second.arena.damage()
    assert not pool.is_whole([first.arena, second.arena], Fetch())
    (found,) = violations(first.arena.on_host(Fetch().at_home))
    assert (found.where, found.distance) == ("after", 2)


def test_pool_that_is_used_up_is_no_limit() -> None:
    """A kernel with a large workspace would fail in a batch only."""
    pool = WorkspacePool("cpu", "nan")
    with allocations(pool) as active:
        small = torch.empty(4)
        large = torch.zeros(workspaces._STRETCH_BYTES // 4)
        another = torch.empty(4)
    assert not active.arena.damage()
    assert not pool.is_whole([active.arena], Fetch())
    assert large.sum() == 0
    assert small.untyped_storage().data_ptr() == another.untyped_storage().data_ptr()
    assert large.untyped_storage().data_ptr() != small.untyped_storage().data_ptr()


def test_nothing_is_filled_for_kernels_that_allocate_nothing() -> None:
    """Kernels without workspaces would pay for those of others."""
    pool = WorkspacePool("cpu", "nan")
    with allocations(pool):
        pass
    assert pool._current is None


def given(kept: KeptBuffers, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, fill: Fill = "nan") -> Tensor:
    made = torch.empty(shape, dtype=dtype)
    prefill_(made, fill)
    kept.add(made, fill)
    return made


def test_only_what_nobody_has_written_to_changes() -> None:
    """A table that a kernel has filled would be overwritten, or what it never wrote hold NaN in every run."""
    kept = KeptBuffers()
    buffer = given(kept, (4, 3))
    buffer[1] = 5.0
    assert kept.renew("finite")[0] is buffer
    assert bool(holds_prefill(buffer[[0, 2, 3]], "finite").all())
    assert buffer[1].tolist() == [5.0] * 3
    buffer[2] = torch.nan
    kept.renew("low")
    assert bool(holds_prefill(buffer[[0, 3]], "low").all())
    assert bool(buffer[2].isnan().all())


def test_what_looks_unwritten_later_was_written() -> None:
    """A number that a kernel computes by chance would be replaced in a later run."""
    kept = KeptBuffers()
    buffer = given(kept, (2,), torch.bfloat16)
    buffer[0] = 1.0
    kept.renew("finite")
    number = buffer[1].clone()
    buffer[0] = number  # bit for bit what the other element holds
    kept.renew("low")
    assert buffer[0] == number
    assert bool(holds_prefill(buffer[1], "low"))


def test_a_view_keeps_its_buffer() -> None:
    """A kernel that keeps part of what it allocates would be taken to keep nothing."""
    with TrackedAllocations("cpu", poison="nan", prefill="nan"):
        part = torch.empty(6, 2)[2:4]
    with TrackedAllocations("cpu", poison="finite", prefill="finite") as allocations:
        pass
    assert [buffer.shape for buffer in allocations.kept] == [(6, 2)]
    assert bool(holds_prefill(part, "finite").all())


def test_what_is_kept_no_longer_is_forgotten() -> None:
    """Memory that has been given to somebody else would be overwritten."""
    with TrackedAllocations("cpu", poison="nan", prefill="nan") as before:
        torch.empty(5)
    with TrackedAllocations("cpu", poison="finite", prefill="finite") as allocations:
        pass
    assert allocations.kept == []
    assert bool(holds_prefill(before.arena.regions[0].tensor, "nan").all())


def test_once_all_of_it_is_written_it_is_left_alone() -> None:
    """Each run would look through all that a kernel keeps, for nothing."""
    kept = KeptBuffers()
    buffer = given(kept, (3,))
    buffer.fill_(1.0)
    assert kept.renew("finite") == []
    prefill_(buffer, "nan")
    kept.renew("finite")
    assert bool(holds_prefill(buffer, "nan").all())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.bool, torch.float8_e4m3fn])
def test_formats_in_which_numbers_look_unwritten_are_left_alone(dtype: torch.dtype) -> None:
    """What a kernel keeps there would be changed behind its back."""
    kept = KeptBuffers()
    buffer: Any = given(kept, (4,), dtype)
    assert kept.renew("finite") == []
    assert bool(holds_prefill(buffer, "nan").all())


def test_buffers_made_in_inference_mode_are_renewed() -> None:
    """torch refuses to change these outside of it: the next run would end in its error."""
    with torch.inference_mode(), TrackedAllocations("cpu", poison="nan", prefill="nan"):
        buffer = torch.empty(3)
    with TrackedAllocations("cpu", poison="finite", prefill="finite"):
        pass
    assert bool(holds_prefill(buffer, "finite").all())


def test_buffers_of_a_moment_push_no_kept_one_out() -> None:
    """A workspace would be forgotten in the call that makes it, if that makes many small buffers after it."""
    kept = KeptBuffers()
    buffer = given(kept, (3,))
    for _ in range(200):
        given(kept, (2,))
    assert [one.shape for one in kept.renew("finite")] == [(3,)]
    assert bool(holds_prefill(buffer, "finite").all())


def test_of_more_than_is_looked_at_the_newest_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that keeps a workspace for each shape would hold stale numbers in the one that it uses now."""
    kept = KeptBuffers()
    buffers = [given(kept, (4,)) for _ in range(3)]
    monkeypatch.setitem(_MOST_NBYTES, "cpu", 40)
    found = kept.renew("finite")
    assert [one.data_ptr() for one in found] == [one.data_ptr() for one in buffers[:0:-1]]
    assert bool(holds_prefill(buffers[2], "finite").all())
    assert bool(holds_prefill(buffers[0], "nan").all())
