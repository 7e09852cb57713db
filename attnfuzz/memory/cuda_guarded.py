"""Guarded memory on a GPU: an access beyond is an illegal memory access, which costs the process its CUDA context."""

from __future__ import annotations

import functools
from collections import defaultdict

import torch
from jaxtyping import UInt8
from torch import Tensor

from attnfuzz.memory.cuda_virtual import CudaVirtualMemory, virtual_memory

__all__ = ["CudaGuardedMemory"]

_ROOM_BYTES = 1 << 16


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
        size = self._block_bytes(nbytes)
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

    def _block_bytes(self, nbytes: int) -> int:
        """Whole granules, with room to tell one edge of a tensor from the other; of large blocks few sizes."""
        granules = -(-(nbytes + _ROOM_BYTES) // self._memory.granule)
        step = 1 << max(0, granules.bit_length() - 3)
        return -(-granules // step) * step * self._memory.granule
