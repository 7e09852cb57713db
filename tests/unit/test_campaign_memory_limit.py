"""attnfuzz.campaign.memory_limit: leaks end early, and nothing that needs its memory is ended for it."""

from __future__ import annotations

from pathlib import Path

from attnfuzz.campaign.memory_limit import available_bytes, memory_limit

GIB = 1 << 30


def test_the_limit_leaves_room_above_what_is_imported() -> None:
    """A kernel that comes with a large library would be ended before its first case."""
    assert memory_limit(3 * GIB, device="cpu", workers=2, available=64 * GIB) == 4 * GIB
    assert memory_limit(GIB, device="cuda", workers=2, available=64 * GIB) == 5 * GIB


def test_workers_share_what_there_is() -> None:
    """Sixteen kernels that leak would together take the machine down, each below its limit."""
    assert memory_limit(GIB // 2, device="cpu", workers=16, available=16 * GIB) < 0.81 * GIB
    assert memory_limit(GIB // 2, device="cpu", workers=64, available=GIB) == GIB // 2 + GIB // 4


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    """In a container, the machine's memory says nothing."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  99 kB\nMemAvailable:  4096 kB\n")
    assert available_bytes(tmp_path) == 4096 * 1024
    groups = tmp_path / "sys" / "fs" / "cgroup"
    groups.mkdir(parents=True)
    (groups / "memory.max").write_text("max\n")
    (groups / "memory.current").write_text("5\n")
    assert available_bytes(tmp_path) == 4096 * 1024
    (groups / "memory.max").write_text("1000\n")
    assert available_bytes(tmp_path) == 995


def test_memory_that_is_not_known_is_not_guessed(tmp_path: Path) -> None:
    """A system without /proc would get a limit of nothing."""
    assert available_bytes(tmp_path) is None
