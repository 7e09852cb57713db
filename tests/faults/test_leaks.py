"""Fault injection (mirrors no module): kernels that leak memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.campaigns import Campaign, saved
from tests.faults.families import Family

MEBIBYTE = 1 << 20
_LARGEST = 2 * (1024 + 700) * MEBIBYTE
"""Of two executors: what is imported, 1 GiB of room, and what is allocated between two looks."""


def private_bytes(family: Family) -> int:
    """Memory of all executors and of what they started, without what they share."""
    return sum(_private_bytes(member.pid) for member in family.members("executor"))


def _private_bytes(pid: int) -> int:
    try:
        resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    except (OSError, ValueError):  # it has just ended
        return 0
    return (resident - shared) * 4096


@pytest.mark.night
def test_a_kernel_that_leaks_does_not_take_the_memory_of_the_machine(tmp_path: Path) -> None:
    """The system would kill whatever it likes best, the campaign or somebody else's work."""
    most, says = 0, "every call keeps another 8.0 MiB"
    with Campaign(tmp_path, "--budget", "300s", kernels="right hoards") as campaign:
        deadline = time.monotonic() + 120.0
        while says not in campaign.output and campaign.process.poll() is None and time.monotonic() < deadline:
            most = max(most, private_bytes(campaign.family))
            time.sleep(0.1)
        campaign.end()
        assert campaign.family.left_after() == []
    assert says in campaign.output, campaign.output
    assert "internal error" not in campaign.output
    assert most < _LARGEST
    assert {regression.finding.kind for regression in saved(tmp_path)} <= {"leak"}
