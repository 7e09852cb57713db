"""Fault injection (mirrors no module): signals, closed terminals, readers that go away, and kernels that leak."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import termios
import time
from pathlib import Path

import msgspec
import pytest

from attnfuzz.campaign.saved.state import load_state
from tests.faults.campaigns import Campaign, assert_nothing_half_written, saved
from tests.faults.families import Family


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.night  # by day: Ctrl-C, tests/commands/test_cli.py
def test_a_signal_ends_a_campaign_in_order(tmp_path: Path, number: signal.Signals) -> None:
    """A scheduler's SIGTERM, or a lost connection, would lose what Ctrl-C keeps."""
    with Campaign(tmp_path, "--budget", "120s") as campaign:
        campaign.wait_for("confirmed")
        campaign.process.send_signal(number)
        assert campaign.wait() == 128 + number
        assert campaign.family.left_after() == []
    assert "interrupted: 1 finding" in campaign.output
    assert "--resume" in campaign.output
    assert len(saved(tmp_path)) == 1
    assert len(load_state(tmp_path / ".attnfuzz").findings) == 1
    assert_nothing_half_written(tmp_path)
    assert list(campaign.temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.by_day("15")
def test_a_signal_while_a_campaign_starts_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """In the seconds in which torch is imported, Ctrl-C would do nothing, print a traceback, or leave processes."""
    with Campaign(tmp_path, "--budget", "120s") as campaign:
        campaign.family.wait_for("zygote")
        campaign.process.send_signal(number)
        assert campaign.wait() == 128 + number
        assert campaign.family.left_after() == []
    assert campaign.output.strip() in ("", "loading torch")
    assert list(campaign.temporary.iterdir()) == []
    assert not (tmp_path / ".attnfuzz").exists()


@pytest.mark.night
def test_a_closed_terminal_ends_a_campaign_in_order(tmp_path: Path) -> None:
    """Whoever closes a window gets no more output, and would lose all that was found."""
    ours, terminal = pty.openpty()
    script = "import fcntl, os, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    assert fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8))
    with Campaign(tmp_path, "--budget", "120s", output=terminal, prefix=["python3", "-c", script]) as campaign:
        os.close(terminal)
        seen = b""
        while b"confirmed" not in seen:
            seen += os.read(ours, 1 << 16)
        os.close(ours)
        assert campaign.wait() == 128 + signal.SIGHUP
        assert campaign.family.left_after() == []
    assert len(saved(tmp_path)) == 1
    assert list(campaign.temporary.iterdir()) == []


@pytest.mark.night
def test_a_campaign_without_anyone_to_read_goes_on(tmp_path: Path) -> None:
    """`attnfuzz explore | head`, or a log collector that died, would end the search with a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    options = ("--budget", "300s", "--fail-fast", "--json", "a.json")
    with Campaign(tmp_path, *options, output=writer) as campaign:
        os.close(writer)
        assert campaign.wait() == 1
        assert campaign.family.left_after() == []
    assert len(saved(tmp_path)) == 1
    assert msgspec.json.decode((tmp_path / "a.json").read_bytes())["stop_reason"] == "fail_fast"


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
