"""Buffers far larger than memory, of which only what is written to takes any: on the host and on a GPU.

An offset that is kept in too few bits comes out wrong only beyond 2^31 elements or 2^32 bytes. Untouched pages of a
private mapping cost nothing, so a buffer of that size fits on any machine that does not count addresses as memory.

On a GPU the rest of what may be read is one piece of memory, put behind address after address: a *background* of
numbers unlike a case's, or of zeros for integers, of which each would be a wrong page id. So an offset that is cut
short reads numbers that show, wherever it points to. What lies outside of its reach, and below a buffer where nothing
is expected to be looked for, has no memory: touching it is an illegal memory access.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import UInt8
from torch import Tensor

from attnfuzz.memory.address_space import SparseUnavailable, reserve
from attnfuzz.memory.cuda_virtual import CudaVirtualMemory, DriverError, virtual_memory


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


Ranges = Iterable[tuple[int, int]]

_PIECES = (64, 16, 4, 1)
"""Granules of the pieces of memory that a background is made of: few mappings for gigabytes, and no gap is left.

Each mapping takes the driver's lock, for which all processes on all GPUs of a machine wait."""
_MOST_MAPPINGS = 4096
"""Most mappings of one buffer: each takes microseconds, here and once more when it is undone."""
_MOST_LIVE = 32
"""Granules of one buffer that hold something."""
_MOST_SPARE = 64
"""Granules that are kept, in idle buffers and outside of any."""
_MOST_IDLE = 24
"""Buffers: to map one takes far longer than a run."""
_MOST_BYTES = 1 << 40
"""Most addresses for one buffer."""


class CudaSparseMemory:
    """Makes buffers, and keeps those that nobody uses any more for the next. One per process and GPU."""

    def __init__(self, memory: CudaVirtualMemory) -> None:
        self._memory = memory
        self.granule = memory.granule
        self._backgrounds: dict[bool, _Background] = {}
        self._spare: list[int] = []
        self._idle: list[_Mapped] = []

    def buffer(
        self, nbytes: int, *, below: int, live: Mapping[int, int], readable: Ranges, numbers: bool
    ) -> UInt8[Tensor, " nbytes"]:
        """``nbytes`` with ``below`` bytes of addresses before them, for others once no tensor refers to it.

        ``live``: which granules have memory of their own, and which: granules with the same number share theirs.

        It holds zeros at first. ``readable``: bytes from start to end, from ``-below`` on, that have the background
        unless they live. ``numbers``: whether that is numbers or zeros. Raises `SparseUnavailable`.
        """
        below, size = self._whole(below), self._whole(nbytes)
        if below + size > _MOST_BYTES:
            raise SparseUnavailable(f"{below + size} bytes of addresses are more than {_MOST_BYTES}")
        count = len(set(live.values()))
        if count > _MOST_LIVE:
            raise SparseUnavailable(f"{count} granules of GPU memory are more than {_MOST_LIVE}")
        background = self._background(numbers)
        kind = _Kind(below, size, tuple(live.items()), tuple(self._granules(readable, -below, size)), numbers)
        mapped = self._taken(kind) or self._mapped(kind, background)
        upper = self._memory.tensor(
            mapped.address + below, size, once_unused=functools.partial(self._idle.append, mapped)
        )
        for granule in {number: granule for granule, number in live.items()}.values():
            upper[granule * self.granule : (granule + 1) * self.granule].zero_()
        return upper[:nbytes]

    def release(self, *, but_for: int = 0) -> None:
        """Undo buffers that no tensor refers to any more, but for the last few; waits for the GPU if there are any."""
        kept = len(self._idle)
        while kept and (kept > but_for or sum(len(one.handles) for one in self._idle[-kept:]) > _MOST_SPARE):
            kept -= 1
        undone = self._idle[: len(self._idle) - kept]
        if undone:
            self._memory.synchronize()
        for mapped in undone:
            self._idle.remove(mapped)
            mapped.undo()
            self._keep(mapped.handles)

    def _taken(self, kind: _Kind) -> _Mapped | None:
        """An idle buffer of a kind. Cases of one format have the same: what is rounded to granules hardly varies."""
        found = next((one for one in reversed(self._idle) if one.kind == kind), None)
        if found is not None:
            self._idle.remove(found)
        return found

    def _mapped(self, kind: _Kind, background: _Background) -> _Mapped:
        self.release(but_for=_MOST_IDLE)
        live = dict(kind.live)
        pieces = list(background.pieces(_without(kind.readable, live)))
        if len(pieces) + len(live) > _MOST_MAPPINGS:
            raise SparseUnavailable(f"{len(pieces) + len(live)} mappings are more than {_MOST_MAPPINGS}")
        numbers = dict.fromkeys(live.values())
        handles = dict(zip(numbers, self._handles(len(numbers)), strict=True))
        pieces += [(granule, 1, handles[number]) for granule, number in live.items()]
        return _Mapped(self._memory, kind, pieces, list(handles.values()))

    def _handles(self, count: int) -> list[int]:
        while len(self._spare) < count:
            self._spare.append(self._memory.create(self.granule))
        return [self._spare.pop() for _ in range(count)]

    def _keep(self, handles: Iterable[int]) -> None:
        self._spare.extend(handles)
        while len(self._spare) > _MOST_SPARE:
            self._memory.release(self._spare.pop())

    def _background(self, numbers: bool) -> _Background:
        if numbers not in self._backgrounds:
            self._backgrounds[numbers] = _Background(self._memory, numbers=numbers)
        found = self._backgrounds[numbers]
        found.fill()  # an earlier kernel may have written there
        return found

    def _granules(self, ranges: Ranges, first: int, end: int) -> list[tuple[int, int]]:
        """Ranges of granules that hold these bytes, within bounds, in order and apart from each other."""
        found: list[tuple[int, int]] = []
        for start, stop in sorted((max(start, first), min(stop, end)) for start, stop in ranges):
            if start >= stop:
                continue
            low, high = start // self.granule, -(-stop // self.granule)
            if found and low <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], high))
            else:
                found.append((low, high))
        return found

    def _whole(self, nbytes: int) -> int:
        return -(-nbytes // self.granule) * self.granule


class _Kind(NamedTuple):
    """The properties that buffers share which can take each other's place; sizes in bytes, ``readable`` in granules."""

    below: int
    size: int
    live: tuple[tuple[int, int], ...]
    readable: tuple[tuple[int, int], ...]
    numbers: bool


class _Mapped:
    """Addresses with memory behind some of them: pieces of (granule, granules, handle)."""

    def __init__(
        self, memory: CudaVirtualMemory, kind: _Kind, pieces: Sequence[tuple[int, int, int]], handles: list[int]
    ) -> None:
        self.kind = kind
        self.handles = handles
        self._memory = memory
        self._nbytes = kind.below + kind.size
        self.address = memory.reserve(self._nbytes)
        self._runs: list[tuple[int, int]] = []
        for granule, count, handle in sorted(pieces):
            start, nbytes = self.address + kind.below + granule * memory.granule, count * memory.granule
            memory.map(start, nbytes, handle)
            if self._runs and sum(self._runs[-1]) == start:
                self._runs[-1] = (self._runs[-1][0], self._runs[-1][1] + nbytes)
            else:
                self._runs.append((start, nbytes))
        for run in self._runs:
            memory.allow(*run)

    def undo(self) -> None:
        for run in self._runs:
            self._memory.unmap(*run)
        self._memory.give_back(self.address, self._nbytes)


class _Background:
    """Pieces of memory, one of them a granule, with the same content in each granule."""

    def __init__(self, memory: CudaVirtualMemory, *, numbers: bool) -> None:
        self._handles = {size: memory.create(size * memory.granule) for size in _PIECES}
        starts = itertools.accumulate(_PIECES, initial=0)
        pieces = [(start, *piece) for start, piece in zip(starts, self._handles.items(), strict=False)]
        nbytes = sum(_PIECES) * memory.granule
        mapped = _Mapped(memory, _Kind(0, nbytes, (), (), numbers), pieces, list(self._handles.values()))
        self._all = memory.tensor(mapped.address, nbytes).view(-1, memory.granule)
        content = _numbers(memory.granule) if numbers else torch.zeros(memory.granule, dtype=torch.uint8, device="cpu")
        self._content = content.to(self._all.device)

    def fill(self) -> None:
        self._all.copy_(self._content.expand_as(self._all))

    def pieces(self, ranges: Ranges) -> Iterator[tuple[int, int, int]]:
        """The memory to map in place of these granules."""
        for low, high in ranges:
            for size, handle in self._handles.items():
                while high - low >= size:
                    yield low, size, handle
                    low += size


def _without(ranges: Ranges, granules: Iterable[int]) -> Iterator[tuple[int, int]]:
    left_out = sorted(granules)
    for low, high in ranges:
        for granule in left_out:
            if low <= granule < high:
                if low < granule:
                    yield low, granule
                low = granule + 1
        if low < high:
            yield low, high


def _numbers(nbytes: int) -> UInt8[Tensor, " nbytes"]:
    """Between 0.5 and 8, of either sign, in float16, bfloat16 and float32, and different from one to the next."""
    index = torch.arange(nbytes // 2, dtype=torch.int64, device="cpu")
    mixed = index * 40503 >> 3
    return (0x3F00 + mixed % 0x200 + (mixed >> 9) % 2 * 0x8000).to(torch.int16).view(torch.uint8)


@functools.cache
def _sparse_memory(device: int) -> CudaSparseMemory:
    return CudaSparseMemory(virtual_memory(device))


def sparse_memory() -> CudaSparseMemory:
    """The sparse memory of torch's current GPU. Raises `SparseUnavailable`."""
    try:
        return _sparse_memory(torch.cuda.current_device())
    except DriverError as error:
        raise SparseUnavailable(str(error)) from error
