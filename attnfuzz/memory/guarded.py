"""Tensors between unmapped memory: an access beyond the guarded end of one is a fault, at full speed and for reads too.

What makes such memory is behind `GuardedMemory`, so that a GPU's own can take the place of the host's.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource
import weakref
from collections import defaultdict
from functools import cache
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import UInt8
from torch import Tensor

from attnfuzz.isolation.memory_faults import FaultMap, GuardedRegion
from attnfuzz.memory.arena import Arena, Region, Span, span
from attnfuzz.memory.cuda_virtual import CudaVirtualMemory, virtual_memory
from attnfuzz.memory.patterns import POISON_BYTES, Fill
from attnfuzz.problems.shapes import Role

Guard = Literal["end", "start"]
"""Which edge of each tensor lies at unmapped memory."""

GUARDS: tuple[Guard, Guard] = ("end", "start")

_POISONED = 1 << 16
"""Bytes beside a tensor, within its block on a GPU, that do not keep what they held: a granule may be 2 MiB."""


@runtime_checkable
class GuardedMemory(Protocol):
    """Gives blocks with at least ``gap_bytes`` of unmapped memory before and after each.

    ``alignment``: of tensors in it, in bytes; 1 if nothing is promised.
    """

    device: torch.device
    gap_bytes: int
    alignment: int

    def take(self, nbytes: int) -> UInt8[Tensor, " block_nbytes"]:
        """A block of at least so many bytes, all of it mapped; its content is whatever it was.

        It may be given out again once no tensor refers to it.
        """
        ...


class GuardedArena(Arena):
    """An arena in which each tensor has a block for itself and fills it from its end, or from its start.

    Alignment: one edge is at that of a page and the other wherever the size puts it, so of a tensor whose end is
    guarded nothing more than the alignment of its elements is certain, and the ``alignment`` of the memory. No code on
    a CPU may count on more.
    """

    def __init__(
        self,
        memory: GuardedMemory,
        fault_map: FaultMap,
        *,
        guard: Guard,
        poison: Fill,
        prefill: Fill,
        room: int = 0,
        aligned: bool = True,
    ) -> None:
        """``fault_map`` is told of each tensor, before anybody can use it.

        ``room``: bytes between the guarded edge and unmapped memory; unless ``aligned`` is False, as many more as the
        alignment takes.
        """
        super().__init__(memory.device, poison=poison, prefill=prefill)
        self._memory = memory
        self._fault_map = fault_map
        self._guard = guard
        self._room = room
        self._aligned = aligned

    @property
    def is_full(self) -> bool:
        """On a CPU, whether a fault beside a further tensor could not be told from a crash.

        So a kernel that allocates thousands of small buffers does not take as many mappings either.
        """
        return self.device.type == "cpu" and self._fault_map.is_full

    def room_beside(self, region: Region) -> UInt8[Tensor, " room"]:
        """The bytes between the guarded edge of a tensor and unmapped memory; poison, if nobody wrote to them.

        As far as 64 KiB from the tensor.
        """
        block = self._chunks[region.chunk]
        if self._guard == "end":
            return block[region.end : region.end + _POISONED]
        return block[max(0, region.start - _POISONED) : region.start]

    def strided(
        self,
        name: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        *,
        role: Role,
        shift: int = 0,
        prefill: bool = True,
    ) -> Tensor:
        """As `Arena.strided`, but next to unmapped memory, for which ``shift`` is ignored."""
        view = super().strided(name, shape, strides, dtype, role=role, prefill=prefill)
        region = self.regions[-1]
        block = self._chunks[region.chunk]
        first, gap = block.data_ptr(), self._memory.gap_bytes
        self._fault_map.add(
            GuardedRegion(
                name=name,
                dtype=str(dtype).removeprefix("torch."),
                shape=shape,
                itemsize=dtype.itemsize,
                start=first + region.start,
                end=first + region.end,
                low=first - gap,
                high=first + block.numel() + gap,
            )
        )
        return view

    def _reserve(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, shift: int) -> Span:
        del shift
        nbytes = span(shape, strides) * itemsize
        block = self._memory.take(nbytes + self._room + self._memory.alignment - 1)
        self._chunks.append(block)
        step = self._memory.alignment if self._aligned else 1
        start = (
            (block.numel() - nbytes - self._room) // step * step
            if self._guard == "end"
            else -(-self._room // step) * step
        )
        around = block.numel() if self.device.type == "cpu" else _POISONED
        block[max(0, start - around) : start + nbytes + around].fill_(POISON_BYTES[self.poison])
        return Span(start, start + nbytes, 0)


class HostGuardedMemory:
    """Blocks of whole pages, reserved with their gaps at once and made accessible in the middle; kept for the next."""

    def __init__(self, *, gap_bytes: int = 1 << 24, spare_bytes: int = 1 << 26) -> None:
        """``gap_bytes``: how far from a tensor an access is still seen, a multiple of the size of a page.

        ``spare_bytes``: how much memory may be kept that nobody uses.
        """
        self.device = torch.device("cpu")
        self.gap_bytes = gap_bytes
        self.alignment = 1
        self._spare_bytes = spare_bytes
        self._spare: defaultdict[int, list[int]] = defaultdict(list)
        self._libc = _libc()

    def take(self, nbytes: int) -> UInt8[Tensor, " block_nbytes"]:
        """A block of at least so many bytes.

        Raises `OSError` if the system has no memory, address space or number of mappings left for it.
        """
        size = _block_bytes(nbytes, mmap.PAGESIZE)
        spare = self._spare[size]
        if spare:
            self._spare_bytes += size
            address = spare.pop()
        else:
            address = self._map(size)
        content = (ctypes.c_ubyte * size).from_address(address)
        weakref.finalize(content, self._give_back, address, size).atexit = False  # tensors may outlive the interpreter
        return torch.frombuffer(content, dtype=torch.uint8)

    def _map(self, size: int) -> int:
        """The address of a new block: the gaps cost no memory, only addresses."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        reserved = self._libc.mmap(None, size + 2 * self.gap_bytes, _PROT_NONE, flags, -1, 0)
        if reserved == _MAP_FAILED:
            raise _error("mmap", size)
        if self._libc.mprotect(reserved + self.gap_bytes, size, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
            error = _error("mprotect", size)
            self._libc.munmap(reserved, size + 2 * self.gap_bytes)
            raise error
        return int(reserved) + self.gap_bytes

    def _give_back(self, address: int, size: int) -> None:
        if size <= self._spare_bytes:
            self._spare_bytes -= size
            self._spare[size].append(address)
        elif self._libc.munmap(address - self.gap_bytes, size + 2 * self.gap_bytes) != 0:
            raise _error("munmap", size)


_PROT_NONE = 0
_MAP_FAILED = ctypes.c_void_p(-1).value


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, integer = ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = (ctypes.c_void_p, size, integer, integer, integer, ctypes.c_long)
    libc.mmap.restype = ctypes.c_void_p
    libc.mprotect.argtypes = (ctypes.c_void_p, size, integer)
    libc.munmap.argtypes = (ctypes.c_void_p, size)
    return libc


def _error(call: str, size: int) -> OSError:
    number = ctypes.get_errno()
    return OSError(
        number,
        f"{call} of a guarded block of {size} bytes failed: {os.strerror(number)}; raise the limit on address space "
        "(ulimit -v) or on mappings (vm.max_map_count), or leave out the oracle guard_page",
    )


def _block_bytes(nbytes: int, unit: int) -> int:
    """Whole units, at least one; of large blocks few sizes, so that they are used again."""
    units = max(1, -(-nbytes // unit))
    step = 1 << max(0, units.bit_length() - 3)
    return -(-units // step) * step * unit


_ROOM_BYTES = 1 << 16
"""Room in a block on a GPU beyond its tensor, to tell one edge of the tensor from the other."""


class CudaGuardedMemory:
    """Blocks of whole granules (2 MiB on an H100) between addresses without memory; kept for the next.

    A tensor begins at a multiple of 16 bytes, so that its end is up to 15 bytes away from unmapped memory. Everything
    that torch allocates is aligned to more than that; kernels load vectors of 16 bytes from tensors whose address they
    need not look at, and CUDA answers a misaligned one with an error that takes the context, too.
    """

    def __init__(
        self, memory: CudaVirtualMemory | None = None, *, gap_bytes: int = 1 << 26, spare_bytes: int = 1 << 27
    ) -> None:
        """``memory``: that of torch's current GPU if None. The other two as of `HostGuardedMemory`.

        Raises `DriverError` where the GPU has no virtual memory management.
        """
        self._memory = memory or virtual_memory(torch.cuda.current_device())
        self.device = torch.device(self._memory.device.type)
        self.alignment = 16
        self.gap_bytes = -(-gap_bytes // self._memory.granule) * self._memory.granule
        self._spare_bytes = spare_bytes
        self._spare: defaultdict[int, list[int]] = defaultdict(list)

    def take(self, nbytes: int) -> UInt8[Tensor, " block_nbytes"]:
        """A block of at least so many bytes. Raises `torch.OutOfMemoryError` and `DriverError`."""
        size = _block_bytes(nbytes + _ROOM_BYTES, self._memory.granule)
        if not self._spare[size]:
            self._trim()
            self._spare[size].append(self._map(size))
        address = self._spare[size].pop()
        # To the pool and no further: to unmap is to wait for the GPU, and who lets go of a tensor may not do that.
        give_back = functools.partial(self._spare[size].append, address)
        return self._memory.tensor(address, size, once_unused=give_back)

    @property
    def spare_nbytes(self) -> int:
        """Memory that is kept for later."""
        return sum(size * len(addresses) for size, addresses in self._spare.items())

    def _map(self, size: int) -> int:
        memory, gap = self._memory, self.gap_bytes
        handle = memory.create(size)
        try:
            address = memory.reserve(size + 2 * gap) + gap
            memory.map(address, size, handle)
            memory.allow(address, size)
        finally:
            memory.release(handle)  # the memory stays for as long as it is mapped
        return address

    def _trim(self) -> None:
        """Give back what is more than may be kept, the largest blocks first."""
        excess = self.spare_nbytes - self._spare_bytes
        if excess <= 0:
            return
        self._memory.synchronize()
        for size in sorted(self._spare, reverse=True):
            while excess > 0 and self._spare[size]:
                self._unmap(self._spare[size].pop(), size)
                excess -= size

    def _unmap(self, address: int, size: int) -> None:
        self._memory.unmap(address, size)
        self._memory.give_back(address - self.gap_bytes, size + 2 * self.gap_bytes)


@cache
def guarded_memory(device: str) -> GuardedMemory:
    """The guarded memory on "cpu" or "cuda". Raises `DriverError` where a GPU has none.

    Under a limit on address space none of it is kept: a kernel would be refused what blocks that nobody uses take.
    """
    if device == "cuda":
        return CudaGuardedMemory()
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return HostGuardedMemory(spare_bytes=0) if is_limited else HostGuardedMemory()
