"""Which tensors lie beside unmapped memory right now, kept where it can be read after this process has died of that.

The driver gives each executor a file for it (`attnfuzz.execution.fault_record`), which both map. A process that has
none, such as a user's own, must not run a kernel on guarded memory: it would die, and nobody could say of what.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec

from attnfuzz.oracles.verdict import OracleName

__all__ = ["FaultMap", "GuardedRegion", "install", "installed", "read_regions"]


_LONGEST_LINE = 1 << 10
"""Bytes, and several times what a region of a case takes."""


class GuardedRegion(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor at the addresses ``start`` up to ``end``, in a block with unmapped memory on both sides.

    ``low`` is where the unmapped memory below the block begins and ``high`` where that above it ends. ``itemsize``: of
    an element, in bytes. ``oracle``: whose finding a fault in there is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: Annotated[int, msgspec.Meta(ge=1)]
    start: int
    end: int
    low: int
    high: int
    oracle: OracleName = "guard_page"


class FaultMap:
    """Regions in ``memory``, one JSON document a line and a zero byte at the end; what does not fit is left out."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._used = 0
        self.clear()

    @property
    def is_full(self) -> bool:
        """Whether the next region may be left out."""
        return len(self._memory) - self._used < _LONGEST_LINE

    def clear(self) -> None:
        """Forget all regions."""
        self._used = 0
        self._memory[0] = 0

    def add(self, region: GuardedRegion) -> None:
        """Note a region before anything can touch it."""
        line = msgspec.json.encode(region) + b"\n\0"
        if self._used + len(line) <= len(self._memory):
            self._memory[self._used : self._used + len(line)] = line
            self._used += len(line) - 1

    @contextmanager
    def recording(self) -> Iterator[FaultMap]:
        """Empty at first, and again at the end: a death after that has nothing to do with guarded memory."""
        self.clear()
        try:
            yield self
        finally:
            self.clear()


def read_regions(memory: bytes) -> tuple[GuardedRegion, ...]:
    """What a `FaultMap` noted in ``memory``; nothing if a stray write has spoilt it."""
    try:
        lines = memory.partition(b"\0")[0].splitlines()
        return tuple(msgspec.json.decode(line, type=GuardedRegion) for line in lines)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()


_installed: FaultMap | None = None


def install(fault_map: FaultMap | None) -> None:
    """Make ``fault_map`` the one of this process."""
    global _installed
    _installed = fault_map


def installed() -> FaultMap | None:
    """That of this process, if somebody will read it."""
    return _installed
