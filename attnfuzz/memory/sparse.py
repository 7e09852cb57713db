"""Stretches of address space far larger than memory, of which only what is written to takes any.

An offset that is kept in too few bits comes out wrong only beyond 2^31 elements or 2^32 bytes. Untouched pages of a
private mapping cost nothing, so a buffer of that size fits on any machine that does not count addresses as memory.
"""

import ctypes
import errno
import functools
import mmap
import os
import sys

import torch
from jaxtyping import UInt8
from torch import Tensor

__all__ = ["SparseBuffer", "SparseUnavailable", "why_unavailable"]

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
_TRIED_BYTES = 1 << 40


class SparseUnavailable(RuntimeError):  # noqa: N818 - a condition of the machine
    """This machine has no such stretch of addresses to give; the message says why and what to do."""


class SparseBuffer:
    """``nbytes`` zeros on the host in ``upper``, and ``below`` bytes before them that kill who touches them.

    Unmapped once no tensor in it is left. Raises `SparseUnavailable`.
    """

    def __init__(self, nbytes: int, *, below: int = 0) -> None:
        if not sys.platform.startswith("linux"):
            raise SparseUnavailable(f"sparse memory is implemented on Linux only, not on {sys.platform}")
        self.nbytes = _whole_pages(nbytes)
        self.below = _whole_pages(below)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._mapping = mmap.mmap(-1, self.below + self.nbytes, flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise SparseUnavailable(_refusal(self.below + self.nbytes, error)) from error
        # A huge page would make 2 MiB of each element that is written.
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._madvise_small_pages()
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

    def _madvise_small_pages(self) -> None:
        try:
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel without huge pages
                raise


def why_unavailable() -> str | None:
    """The sentence of `SparseUnavailable` for a large buffer on this machine; None where it can be had."""
    try:
        SparseBuffer(_TRIED_BYTES)
    except SparseUnavailable as reason:
        return str(reason)
    return None


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _protect(address: int, nbytes: int, *, writable: bool) -> None:
    """Python's mmap cannot change what may be done with a part of a mapping."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else 0
    if _libc().mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(protection)):
        code = ctypes.get_errno()
        raise SparseUnavailable(f"mprotect of {nbytes} bytes failed: {os.strerror(code)}")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _refusal(nbytes: int, error: Exception) -> str:
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return (
        f"the system gives no {nbytes >> 30} GiB of addresses ({reason}); allow it with "
        "sysctl vm.overcommit_memory=0 and ulimit -v unlimited"
    )
