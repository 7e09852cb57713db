"""What is said where there are no addresses to be had."""

from __future__ import annotations

import mmap
import resource
import sys
from pathlib import Path

import pytest

from attnfuzz.memory.reservation import SparseUnavailable, reserve, why_unavailable


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
