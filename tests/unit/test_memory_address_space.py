"""A bound on what may be allocated for a while."""

from __future__ import annotations

import mmap
import resource
import sys
from pathlib import Path

import pytest
import torch

from attnfuzz.memory.address_space import SparseUnavailable, at_most_more, reserve, why_unavailable


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
