"""Workspaces of a batch: guarded as those of a single run, out of memory that was filled once."""

from __future__ import annotations

import pytest
import torch

from attnfuzz.memory import workspaces
from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.fetch import Fetch
from attnfuzz.memory.patterns import bits
from attnfuzz.memory.violations import violations
from attnfuzz.memory.workspaces import WorkspacePool


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


def test_overrun_is_seen_in_any_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write past a workspace would go unseen once a batch has used up the first stretch."""
    monkeypatch.setattr(workspaces, "_STRETCH_BYTES", 1 << 20)
    pool = WorkspacePool("cpu", "nan")
    runs = [allocations(pool) for _ in range(40)]
    buffers = []
    for run in runs:
        with run:
            buffers.append(torch.empty(1 << 14))
    assert len({buffer.untyped_storage().data_ptr() for buffer in buffers}) > 2
    assert pool.is_whole([run.arena for run in runs], Fetch())
    for buffer in (buffers[0], buffers[-1]):
        past = bits(buffer.as_strided((1,), (1,), buffer.storage_offset() + (1 << 14) + 1))
        before = past.clone()
        past.fill_(1)
        assert not pool.is_whole([run.arena for run in runs], Fetch())
        past.copy_(before)


def test_nothing_is_filled_for_kernels_that_allocate_nothing() -> None:
    """Kernels without workspaces would pay for those of others."""
    pool = WorkspacePool("cpu", "nan")
    with allocations(pool):
        pass
    assert pool._current is None
