"""attnfuzz.campaign.judge.executor: leaks end early, and nothing that needs its memory is ended for it."""

from __future__ import annotations

from attnfuzz.campaign.judge.executor import memory_limit

GIB = 1 << 30


def test_the_limit_leaves_room_above_what_is_imported() -> None:
    """A kernel that comes with a large library would be ended before its first case."""
    assert memory_limit(3 * GIB, device="cpu", workers=2, available=64 * GIB) == 4 * GIB
    assert memory_limit(GIB, device="cuda", workers=2, available=64 * GIB) == 5 * GIB


def test_workers_share_what_there_is() -> None:
    """Sixteen kernels that leak would together take the machine down, each below its limit."""
    assert memory_limit(GIB // 2, device="cpu", workers=16, available=16 * GIB) < 0.81 * GIB
    assert memory_limit(GIB // 2, device="cpu", workers=64, available=GIB) == GIB // 2 + GIB // 4
