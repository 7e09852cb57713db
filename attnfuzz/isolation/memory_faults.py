"""Names the memory fault that an executor died of, and which tensor lay there, from what is left after its death.

Before a handler runs, the system writes to the top of its stack what the process was doing: all registers, and of a
page fault the address and whether it was a write (`struct rt_sigframe`, the last member of which is a `ucontext_t`).
faulthandler's handlers run on an alternate stack (sigaltstack(2)). Here that lies in a file which the driver holds
too, beside a map of the tensors that lie beside unmapped memory right now, so that nothing has to be executed in a
process that is dying. A process without such a file, such as a user's own, must not run a kernel on guarded memory: it
would die, and nobody could say of what.

Linux on x86-64 only. Elsewhere there is no record, guarded memory is not used, and a fault is a crash like others. The
alternate stack is the main thread's, in which kernels are called: a fault in another thread is a crash, too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import platform
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from attnfuzz.oracles.registry import GUARD_PAGE, OracleName

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
    oracle: OracleName = GUARD_PAGE.name


@dataclass(frozen=True, slots=True)
class MemoryFault:
    """An access to memory that is not mapped, or not for that.

    `regions`: the tensors that lay beside unmapped memory then.
    """

    address: int
    access: Literal["read", "write"]
    regions: tuple[GuardedRegion, ...]


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
    """The regions that a `FaultMap` noted in ``memory``; none if a stray write has spoilt it."""
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
    """The fault map of this process, if somebody will read it."""
    return _installed


_MAP_BYTES = 1 << 16
_STACK_BYTES = 1 << 18
"""The registers take up to 11 KB of it (AMX), faulthandler the rest."""
_RECORD_BYTES = _MAP_BYTES + _STACK_BYTES
_ADDRESS = struct.Struct("<Q")
"""The first of the map's bytes say where the stack lies in the executor, which is how its frames are recognised."""

# Bytes from the start of a ucontext_t, as in glibc's <sys/ucontext.h> for x86-64.
_UC_STACK = 16
_UC_ERROR = 40 + 8 * 19
_UC_TRAP_NUMBER = 40 + 8 * 20
_UC_FAULT_ADDRESS = 40 + 8 * 22

_SIGACTION_BYTES = 256
"""More than a struct sigaction has."""

_PAGE_FAULT = 14
_WAS_WRITE = 2
"""Bit of the error code (Intel SDM volume 3, "Page-Fault Exceptions")."""


class _Stack(ctypes.Structure):
    """stack_t"""

    _fields_ = (("ss_sp", ctypes.c_void_p), ("ss_flags", ctypes.c_int), ("ss_size", ctypes.c_size_t))


def why_unavailable() -> str | None:
    """Why faults are not recorded on this system; None where they are."""
    if sys.platform.startswith("linux") and platform.machine() == "x86_64":
        return None
    return f"what a process died of is known on Linux on x86-64 only, not on {sys.platform} on {platform.machine()}"


def new_record() -> int | None:
    """A file for one executor, as a file descriptor; takes no memory until it is written to.

    None where there can be none, for a limit on the size of files or on their number: deaths are told of without.
    """
    try:
        descriptor = os.memfd_create("attnfuzz-faults")
    except OSError:
        return None
    try:
        os.ftruncate(descriptor, _RECORD_BYTES)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


class FatalSignals:
    """Has faulthandler write stacks to ``output`` when a signal ends the calling process.

    And faults of the calling thread are recorded in ``record``, where the system permits that: its guarded memory is
    installed then. Raises OSError.
    """

    def __init__(self, output: int, record: int | None) -> None:
        self._output = output
        self._record = None if record is None or why_unavailable() else mmap.mmap(record, _RECORD_BYTES)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._own = self._report()
        if self._record is not None:
            install(FaultMap(memoryview(self._record)[_ADDRESS.size : _MAP_BYTES]))

    def take_back(self) -> None:
        """Report again, if code under test has put handlers of its own in place: libraries do as they are imported."""
        if self._handlers() != self._own:
            faulthandler.disable()
            self._own = self._report()

    def _report(self) -> tuple[bytes, ...]:
        faulthandler.enable(file=self._output)
        if self._record is not None:  # after faulthandler, which sets an alternate stack of its own
            bottom = ctypes.addressof(ctypes.c_char.from_buffer(self._record, _MAP_BYTES))
            self._call("sigaltstack", ctypes.byref(_Stack(bottom, 0, _STACK_BYTES)), None)
            _ADDRESS.pack_into(self._record, 0, bottom)
        return self._handlers()

    def _handlers(self) -> tuple[bytes, ...]:
        if self._record is None:
            return ()
        found = []
        for number in (signal.SIGSEGV, signal.SIGBUS):
            action = ctypes.create_string_buffer(_SIGACTION_BYTES)  # of which the address of the handler comes first
            self._call("sigaction", int(number), None, action)
            found.append(action.raw[: _ADDRESS.size])
        return tuple(found)

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._libc, name)(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"{name} failed: {os.strerror(ctypes.get_errno())}")


def read_record(descriptor: int) -> MemoryFault | None:
    """The page fault that ended the executor; None if it was none, or another thread's."""
    content = os.pread(descriptor, _RECORD_BYTES, 0)
    context = _first_context(content)
    if context is None or context + _UC_FAULT_ADDRESS + _ADDRESS.size > len(content):  # a stray write has spoilt it
        return None
    trap, address, error = (
        _ADDRESS.unpack_from(content, context + field)[0] for field in (_UC_TRAP_NUMBER, _UC_FAULT_ADDRESS, _UC_ERROR)
    )
    if trap != _PAGE_FAULT:
        return None
    regions = read_regions(content[_ADDRESS.size : _MAP_BYTES])
    return MemoryFault(address, "write" if error & _WAS_WRITE else "read", regions)


def _first_context(content: bytes) -> int | None:
    """Where the ucontext_t of the first signal is: it names the stack that the handler runs on, and lies topmost."""
    bottom, size = content[: _ADDRESS.size], _ADDRESS.pack(_STACK_BYTES)
    found = content.rfind(bottom, _MAP_BYTES) if any(bottom) else -1
    while found >= 0:
        if content.startswith(size, found + _Stack.ss_size.offset):
            return found - _UC_STACK
        found = content.rfind(bottom, _MAP_BYTES, found)
    return None
