"""A bound on what may be allocated for a while."""

from __future__ import annotations

import resource

import pytest
import torch

from attnfuzz.memory.address_limit import at_most_more


def test_large_allocations_fail_within_and_succeed_afterwards() -> None:
    """A kernel that copies a sparse cache as a whole would take the machine's memory with it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with at_most_more(1 << 28):
        torch.empty(1 << 20)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(1 << 30)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    torch.empty(1 << 30)
