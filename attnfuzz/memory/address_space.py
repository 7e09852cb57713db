"""Addresses without memory behind them, from the operating system, and a bound on them. Torch-free."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
MOST_BYTES = 1 << 43
"""Most addresses for one tensor and the gap below it: a small part of the 2^47 that a process has."""

_TRIED_BYTES = 1 << 36
"""Most addresses that a case at page ids past 2^32 elements takes, but for few."""


class SparseUnavailable(RuntimeError):  # noqa: N818 - a condition of the machine
    """This machine has no such stretch of addresses to give; the message says why and what to do."""


def reserve(nbytes: int) -> mmap.mmap:
    """Zeros that take memory once they are written to. Raises `SparseUnavailable`."""
    if not sys.platform.startswith("linux"):
        raise SparseUnavailable(f"sparse memory is implemented on Linux only, not on {sys.platform}")
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except (OSError, ValueError, OverflowError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise SparseUnavailable(
            f"the system gives no {nbytes >> 30} GiB of addresses ({reason}); allow it with "
            "sysctl vm.overcommit_memory=0 and ulimit -v unlimited"
        ) from error
    # A huge page would make 2 MiB of each element that is written.
    with contextlib.suppress(OSError):  # EINVAL: the system has none
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return mapping


def why_unavailable() -> str | None:
    """The sentence of `SparseUnavailable` for a large stretch on this machine; None where it can be had."""
    try:
        reserve(_TRIED_BYTES).close()
    except SparseUnavailable as reason:
        return str(reason)
    return None


_STATM = Path("/proc/self/statm")


@contextlib.contextmanager
def at_most_more(nbytes: int) -> Iterator[None]:
    """Within, allocations fail that take this process more than ``nbytes`` beyond what it has mapped now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = int(_STATM.read_text().split()[0]) * mmap.PAGESIZE + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (wanted if soft == resource.RLIM_INFINITY else min(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
