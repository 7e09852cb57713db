"""A bound on the addresses that a process may take while something runs that could copy a huge, empty tensor."""

import contextlib
import mmap
import resource
from collections.abc import Iterator
from pathlib import Path

__all__ = ["at_most_more"]

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
