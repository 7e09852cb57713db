"""The guarded memory of this process, one for each kind of device."""

from __future__ import annotations

import resource
from functools import cache

from attnfuzz.memory.cuda_guarded import CudaGuardedMemory
from attnfuzz.memory.guarded import GuardedMemory, HostGuardedMemory

__all__ = ["guarded_memory"]


@cache
def guarded_memory(device: str) -> GuardedMemory:
    """That on "cpu" or "cuda". Raises `DriverError` where a GPU has none.

    Under a limit on address space none of it is kept: a kernel would be refused what blocks that nobody uses take.
    """
    if device == "cuda":
        return CudaGuardedMemory()
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return HostGuardedMemory(spare_bytes=0) if is_limited else HostGuardedMemory()
