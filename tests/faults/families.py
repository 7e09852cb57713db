"""Finding, counting and killing the processes of a campaign from outside: by a mark in their environment."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Role = Literal["driver", "worker", "zygote", "executor"]

_MARK = "ATTNFUZZ_FAULT_TEST"
_ZYGOTE = b"attnfuzz.isolation.zygote"
_WORKER = b"attnfuzz.campaign.worker"


@dataclass(frozen=True, slots=True)
class Member:
    """A live process of a family."""

    pid: int
    role: Role

    def kill(self, number: int = signal.SIGKILL) -> bool:
        """Send a signal; whether the process was still there to get it."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Family:
    """All processes that carry one mark, which they hand on to whatever they start."""

    mark: str = field(default_factory=lambda: secrets.token_hex(8))

    def environment(self) -> Mapping[str, str]:
        """What a new member is started with."""
        return {**os.environ, _MARK: self.mark}

    def members(self, *roles: Role) -> list[Member]:
        """Those that live now, only of ``roles`` if given. A zombie has no environment and does not count."""
        wanted = f"{_MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            if wanted in _fields(entry / "environ"):
                found.append(Member(int(entry.name), _role(entry)))
        return [member for member in found if not roles or member.role in roles]

    def wait_for(self, role: Role, *, timeout_s: float = 60.0) -> Member:
        """The first member of ``role``, waited for."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.members(role)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {role} within {timeout_s} s")
            time.sleep(0.02)
        return found[0]

    def left_after(self, timeout_s: float = 10.0) -> list[Member]:
        """Who is still there after ``timeout_s``; looked at all the time, so that nobody waits for nothing."""
        deadline = time.monotonic() + timeout_s
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def _role(entry: Path) -> Role:
    arguments = _fields(entry / "cmdline")
    if _WORKER in arguments:
        return "worker"
    if _ZYGOTE not in arguments:
        return "driver"
    return "executor" if _ZYGOTE in _fields(Path(f"/proc/{_parent(entry)}/cmdline")) else "zygote"


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):  # it has just ended
        return 0


def _fields(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:  # it has just ended
        return []
