"""Which guarded memory a process has."""

from __future__ import annotations

import gc
import resource

import pytest

from attnfuzz.memory.guarded import HostGuardedMemory
from attnfuzz.memory.guarded_of import guarded_memory


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
