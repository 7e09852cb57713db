"""Buffers far larger than memory, of which only what is written to takes any.

An offset that is kept in too few bits comes out wrong only beyond 2^31 elements or 2^32 bytes. Untouched pages of a
private mapping cost nothing, so a buffer of that size fits on any machine that does not count addresses as memory.
"""

import ctypes
import functools
import mmap
import os

import torch
from jaxtyping import UInt8
from torch import Tensor

from attnfuzz.memory.reservation import SparseUnavailable, reserve

__all__ = ["SparseBuffer"]


class SparseBuffer:
    """``nbytes`` zeros on the host in ``upper``, and ``below`` bytes before them that kill who touches them.

    Unmapped once no tensor in it is left. Raises `SparseUnavailable`.
    """

    def __init__(self, nbytes: int, *, below: int = 0) -> None:
        self.nbytes = _whole_pages(nbytes)
        self.below = _whole_pages(below)
        self._mapping = reserve(self.below + self.nbytes)
        self._all = torch.frombuffer(self._mapping, dtype=torch.uint8)
        if self.below:
            _protect(self._all.data_ptr(), self.below, writable=False)

    @property
    def upper(self) -> UInt8[Tensor, " nbytes"]:
        """The part that may be read and written; its storage starts with it."""
        return torch.frombuffer(self._mapping, dtype=torch.uint8, offset=self.below)

    def opened(self, start: int, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        """``nbytes`` from byte ``start`` of `upper`, which may be negative: the memory pages there become usable."""
        if not -self.below <= start <= start + nbytes <= self.nbytes:
            raise ValueError(f"bytes {start} to {start + nbytes} must lie within {-self.below} to {self.nbytes}")
        found = self._all[self.below + start : self.below + start + nbytes]
        if start < 0:
            first = found.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            _protect(first, _whole_pages(found.data_ptr() + nbytes - first), writable=True)
        return found


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _protect(address: int, nbytes: int, *, writable: bool) -> None:
    """Python's mmap cannot change what may be done with a part of a mapping."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else 0
    if _libc().mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(protection)):
        raise SparseUnavailable(f"mprotect of {nbytes} bytes failed: {os.strerror(ctypes.get_errno())}")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
