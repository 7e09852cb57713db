"""A GPU's virtual memory, played by the host's: reservations without access, and files mapped into them."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from attnfuzz.memory.cuda_virtual import CudaVirtualMemory

GRANULE = 1 << 16
_FIXED = 0x10


class HostVirtualMemory(CudaVirtualMemory):
    """As a GPU's, with granules of another size. Counts what is mapped and created."""

    def __init__(self, granule: int = GRANULE) -> None:
        self.device = torch.device("cpu")
        self.granule = granule
        self.mapped = 0
        self.created: set[int] = set()
        self.reserved: dict[int, int] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)
        size, integer = ctypes.c_size_t, ctypes.c_int
        self._libc.mmap.argtypes = (ctypes.c_void_p, size, integer, integer, integer, ctypes.c_long)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mprotect.argtypes = (ctypes.c_void_p, size, integer)
        self._libc.munmap.argtypes = (ctypes.c_void_p, size)

    def reserve(self, nbytes: int) -> int:
        assert nbytes % self.granule == 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
        found = self._libc.mmap(None, nbytes + self.granule, 0, flags, -1, 0)
        assert found != ctypes.c_void_p(-1).value
        address = -(-int(found) // self.granule) * self.granule
        self.reserved[address] = nbytes
        return address

    def give_back(self, address: int, nbytes: int) -> None:
        assert self._libc.munmap(address, nbytes) == 0
        del self.reserved[address]

    def give_back_everything(self) -> None:
        """Once nothing uses it: a page counts for the process's size wherever it is mapped, for gigabytes in all."""
        for address, nbytes in [*self.reserved.items()]:
            self.give_back(address, nbytes)
        for handle in [*self.created]:
            self.release(handle)

    def create(self, nbytes: int) -> int:
        handle = os.memfd_create("granule")
        os.ftruncate(handle, nbytes)
        self.created.add(handle)
        return handle

    def release(self, handle: int) -> None:
        self.created.remove(handle)
        os.close(handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        assert address % self.granule == 0
        assert any(start <= address and address + nbytes <= start + size for start, size in self.reserved.items())
        assert os.fstat(handle).st_size == nbytes
        flags = mmap.MAP_SHARED | _FIXED
        assert self._libc.mmap(address, nbytes, 0, flags, handle, 0) == address
        self.mapped += nbytes

    def allow(self, address: int, nbytes: int) -> None:
        assert self._libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE) == 0

    def unmap(self, address: int, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000 | _FIXED
        assert self._libc.mmap(address, nbytes, 0, flags, -1, 0) == address
        self.mapped -= nbytes

    def synchronize(self) -> None:
        pass

    def tensor(self, address: int, nbytes: int, *, once_unused: Callable[[], None] | None = None) -> Tensor:
        content = (ctypes.c_ubyte * nbytes).from_address(address)
        if once_unused is not None:
            weakref.finalize(content, once_unused).atexit = False
        return torch.frombuffer(content, dtype=torch.uint8)


def permissions(address: int) -> str:
    """What may be done at an address, as in /proc/self/maps; empty if nothing is there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, what, *_ = line.split()
        low, high = (int(part, 16) for part in bounds.split("-"))
        if low <= address < high:
            return what
    return ""
