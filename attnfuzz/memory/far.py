"""A case's tensors with live elements beyond 2^32 elements, and decoys where offsets of 32 bits would look for them.

Caches get so many pages before their first that it lies there, and a mask so many entries; of other tensors, one stride
is so wide that the last row does. Sparse memory makes that cheap: nothing but live elements and decoys takes any. Below
a tensor, where there is no decoy, nothing is mapped.

On a GPU memory comes in granules of megabytes. Decoys share one piece of it, as does all of a cache that does not live;
and rows are so many granules apart that they share theirs, side by side as in a contiguous tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor

from attnfuzz.isolation.memory_faults import FaultMap, GuardedRegion
from attnfuzz.memory.address_space import MOST_BYTES, SparseUnavailable
from attnfuzz.memory.arena import Arena, span
from attnfuzz.memory.patterns import bits, prefill_
from attnfuzz.memory.sparse import CudaSparseMemory, SparseBuffer
from attnfuzz.oracles.registry import PAGE_RELOCATION
from attnfuzz.problems.recipes import StrideKind
from attnfuzz.problems.shapes import Role, strided_layout

_OFFSET_BITS = 32
_SIGNS = (False, True)


def wrapped(start: int, length: int, bits: int, *, signed: bool) -> Iterator[tuple[int, int]]:
    """``range(start, start + length)`` in a type of so many bits: pieces of consecutive numbers, (start, length)."""
    lowest, period = (-(1 << bits - 1) if signed else 0), 1 << bits
    while length > 0:
        lands = (start - lowest) % period + lowest
        piece = min(length, lowest + period - lands)
        yield lands, piece
        start, length = start + piece, length - piece


def landings(start: int, length: int, itemsize: int) -> set[tuple[int, int]]:
    """Where elements ``start`` and on are looked for if offsets are 32 bits wide, in elements or bytes, of either sign.

    Pieces (start, length) in elements that begin elsewhere than what they stand for, perhaps below 0.
    """
    return {(lands, piece) for _, lands, piece in _moved(start, length, itemsize)}


def _moved(start: int, length: int, itemsize: int) -> Iterator[tuple[int, int, int]]:
    """As `landings`, each piece with the element that it stands for."""
    for signed in _SIGNS:
        for unit in (1, itemsize):
            at = start
            for lands, piece in wrapped(start * unit, length * unit, _OFFSET_BITS, signed=signed):
                if lands != at * unit:
                    yield at, lands // unit, piece // unit
                at += piece // unit


CACHES = ("k_cache", "v_cache", "kv_cache")
FAR = 1 << 32
"""Elements: offsets from here on do not fit into 32 bits, whatever their sign and unit."""

_LARGEST_SIGNED = 1 << 31
_ID_BITS = 16
MOST_ROWS = 1 << 10
"""Most rows of a tensor with a wide stride: each takes a page of memory."""
MOST_ROWS_ON_GPU = 1 << 8
"""There each takes several mappings; those of many rows take more time than all else that is done for a case."""
_MOST_ROWS_WITH_DECOYS = 64
_APART = 4
"""Granules on a GPU, more than a case has in one tensor: a power of two further, a short offset must not come out at
memory that the right row shares with others."""
_MOST_ROWS_WITH_GRANULES = 16
"""On a GPU: of more rows, the decoys would take as many mappings as gigabytes in one piece."""
_MOST_DECOYS = 1 << 24
"""Elements in a row: beyond, there are zeros."""
_MOST_MAPPED = FAR << 2
"""Elements of a cache in a GPU's memory that can all be read."""
_ALIGNMENT = 64  # elements between strides
_COMPILED_FOR = 16
_WIDE = (1 << 30) + (1 << 20)
"""Elements: a stride that fits into 32 bits, with which every index but the first two passes 2^31. What wraps by 2^32
elements or bytes comes out beside the rows that are there."""


class _Live(NamedTuple):
    """A stretch of memory that holds what lives, in elements.

    Of its offset all but ``wide`` may be what has 32 bits: an index of a sequence is cast more often than one of a
    token.
    """

    start: int
    length: int
    wide: int = 0


class _Placed(NamedTuple):
    """A far tensor on the host, and what of it lives."""

    buffer: SparseBuffer
    dtype: torch.dtype
    elements: int
    live: Sequence[_Live]
    role: Role


class FarAllocator:
    """An `Allocator`; raises `SparseUnavailable` where there is no such memory.

    ``first_page``: of the caches, where the case's pages begin. ``first_entry``: of the mask, where its tables do.
    ``moved``: of other tensors, where what the case has of them begins.
    ``stretched``: the dimension of a tensor that gets a wide stride; at most `MOST_ROWS` vectors lie apart then.
    ``near``: a gap as small as can be, in place of that. All other tensors come from ``arena``. `whole` holds the whole
    caches or the whole mask, what `tensor` returns is the part of the case. Only with a ``fault_map``, which will tell
    of it, is a touch below a tensor deadly; on a GPU, with ``on_gpu`` as the memory of such tensors, it always is.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        first_page: int = 0,
        first_entry: int = 0,
        moved: Mapping[str, int] | None = None,
        stretched: Mapping[str, int] | None = None,
        near: bool = False,
        fault_map: FaultMap | None = None,
        on_gpu: CudaSparseMemory | None = None,
    ) -> None:
        self.device = arena.device
        self.whole: dict[str, Tensor] = {}
        self._arena = arena
        self._first = dict.fromkeys(CACHES, first_page) | {"mask": first_entry, **(moved or {})}
        self._stretched = stretched or {}
        self._near = near
        self._fault_map = fault_map
        self._on_gpu = on_gpu
        self._placed: list[_Placed] = []
        self._before: list[Tensor] = []

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, strides: StrideKind, role: Role
    ) -> Shaped[Tensor, "..."]:
        """The live part of a tensor: poison, or pre-fill if its `role` is "output"."""
        if self._first.get(name):
            return self._pages(name, shape, dtype, strides, role)
        if name in self._stretched and self._near:
            gapped = gapped_strides(shape, self._stretched[name])
            return self._arena.strided(name, shape, gapped, dtype, role=role)
        if name in self._stretched:
            return self._rows(name, shape, dtype, role)
        return self._arena.tensor(name, shape, dtype, strides=strides, role=role)

    def only_changes(self, name: str, where: Tensor) -> None:
        """As the arena's, of what lies there."""
        if name not in self.whole:
            self._arena.only_changes(name, where)

    def put_where_short_offsets_land(self) -> None:
        """Have what lives in each far tensor on the host lie there as well, in place of decoys.

        A kernel whose offsets are right but for having 32 bits is right then, and none that is wrong otherwise.
        """
        for buffer, dtype, own, landed, _ in self._pieces():
            size = dtype.itemsize
            source = buffer.opened(own[0] * size, own[1] * size)
            buffer.opened(landed * size, own[1] * size).copy_(source)
            self._before.append(source.view(dtype).clone())

    def take_from_where_short_offsets_land(self) -> None:
        """Bring results that were written there, and not to their own places, to these."""
        for (buffer, dtype, own, landed, role), before in zip(self._pieces(), self._before, strict=True):
            if role == "output":
                size = dtype.itemsize
                ours = bits(buffer.opened(own[0] * size, own[1] * size).view(dtype))
                theirs = bits(buffer.opened(landed * size, own[1] * size).view(dtype))
                is_there = (ours == bits(before)) & (theirs != bits(before))
                ours.copy_(torch.where(is_there, theirs, ours))

    def _pieces(self) -> Iterator[tuple[SparseBuffer, torch.dtype, tuple[int, int], int, Role]]:
        """The live parts, as start and length in elements, and where short offsets look for them, if in reach."""
        for buffer, dtype, elements, live, role in self._placed:
            lowest = -(buffer.below // dtype.itemsize)
            for start, length, wide in live:
                for at, cut, piece in dict.fromkeys(_moved(start - wide, length, dtype.itemsize)):
                    lands = cut + wide
                    if lowest <= lands <= lands + piece <= elements:
                        yield buffer, dtype, (at + wide, piece), lands, role

    def _pages(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: StrideKind, role: Role) -> Tensor:
        first, count = self._first[name], shape[0]  # a mask has no pages: each entry stands for one
        whole = (first + count, *shape[1:])
        layout = strided_layout(whole, kind, dtype.itemsize)
        block, strips = layout.strides[0], list(_page_strips(shape, layout.strides, layout.offset))
        decoys = {
            (start + page * block, pages * block) for start, _ in strips for page, pages in _wrong_ids(first, count)
        }
        for start, length in strips:
            decoys |= landings(start + first * block, length, dtype.itemsize)
        below = max(_LARGEST_SIGNED, block << _ID_BITS - 1)
        elements = layout.storage_elements
        if self._on_gpu is None:
            live_strips = [_Live(start + first * block, length) for start, length in strips]
            memory = self._laid_out(name, elements, dtype, decoys, live_strips, role, below=below)
        else:
            # All of it is elements, and a kernel may copy them. Where that is too much to be copied, and to be mapped:
            # entries of the table that nobody uses may be 0, and that page be read.
            decoys |= {(0, elements if elements <= _MOST_MAPPED else FAR)} | {
                (start, count * block) for start, _ in strips
            }
            live = _own_granules([(start + first * block, length) for start, length in strips], self._granule(dtype))
            memory = self._mapped(elements, dtype, live, decoys, below=below)
        cache = memory.as_strided(whole, layout.strides, layout.offset)
        self.whole[name] = cache
        window = cache.narrow(0, first, count)
        _poison(window)
        return window

    def _rows(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, role: Role) -> Tensor:
        axis = self._stretched[name]
        length = math.prod(shape[axis + 1 :])
        if self._on_gpu is None:
            strides = stretched_strides(shape, axis, least=_WIDE)
        else:  # whose addresses between rows cost page tables
            strides = stretched_strides(shape, axis, self._granule(dtype), more=_APART * self._granule(dtype))
        starts = _offsets(shape[: axis + 1], strides[: axis + 1])
        most, everywhere = _MOST_ROWS_WITH_DECOYS, {(-_LARGEST_SIGNED, _LARGEST_SIGNED)}
        if self._on_gpu is not None:
            most, everywhere = _MOST_ROWS_WITH_GRANULES, {(-_LARGEST_SIGNED, _LARGEST_SIGNED + FAR)}
        decoys = everywhere
        if len(starts) <= most:
            decoys = {decoy for start in starts for decoy in landings(start, length, dtype.itemsize)}
        if self._on_gpu is not None:
            live = _shared_granules(starts, length, self._granule(dtype))
            memory = self._mapped(span(shape, strides), dtype, live, decoys, below=_LARGEST_SIGNED)
        else:
            around = _offsets(shape[:axis], strides[:axis])
            inner = _offsets(shape[axis : axis + 1], strides[axis : axis + 1])
            rows_at = [_Live(wide + own, length, of) for wide in around for own in inner for of in {0, wide}]
            memory = self._laid_out(name, span(shape, strides), dtype, decoys, rows_at, role, below=_LARGEST_SIGNED)
        rows = memory.as_strided(shape, strides)
        if role == "output":
            prefill_(rows, self._arena.prefill)
        else:
            _poison(rows)
        return rows

    def _laid_out(
        self,
        name: str,
        elements: int,
        dtype: torch.dtype,
        decoys: set[tuple[int, int]],
        live: Sequence[_Live],
        role: Role,
        *,
        below: int,
    ) -> Shaped[Tensor, " elements"]:
        """Memory for so many elements, with numbers unlike a case's at each of ``decoys`` that lies within reach."""
        size = dtype.itemsize
        if (elements + below) * size > MOST_BYTES:
            raise SparseUnavailable(f"{(elements + below) * size} bytes of addresses are more than {MOST_BYTES}")
        buffer = SparseBuffer(elements * size, below=below * size)
        self._placed.append(_Placed(buffer, dtype, elements, live, role))
        if self._fault_map is None:
            buffer.opened(-below * size, below * size)
        else:
            self._fault_map.add(_region(name, elements, dtype, buffer))
        lengths = [length for _, length in decoys if length <= _MOST_DECOYS]
        numbers = _decoy(max(lengths, default=0), dtype)
        for start, length in decoys:
            first, last = max(start, -below), min(start + length, elements)
            if first < last:
                part = buffer.opened(first * size, (last - first) * size)
                if dtype.is_floating_point and length <= _MOST_DECOYS:  # a wrong page id is 0
                    part.view(dtype).copy_(numbers[: last - first])
        return buffer.upper[: elements * size].view(dtype)

    def _mapped(
        self, elements: int, dtype: torch.dtype, live: Mapping[int, int], decoys: set[tuple[int, int]], *, below: int
    ) -> Shaped[Tensor, " elements"]:
        """As `_laid_out`, with the granules ``live``."""
        if self._on_gpu is None:
            raise TypeError("only a GPU's memory comes in granules")
        size = dtype.itemsize
        readable = {(start * size, (start + length) * size) for start, length in decoys}
        try:
            upper = self._on_gpu.buffer(
                elements * size, below=below * size, live=live, readable=readable, numbers=dtype.is_floating_point
            )
        except torch.OutOfMemoryError as error:
            raise SparseUnavailable(str(error)) from error
        return upper.view(dtype)

    def _granule(self, dtype: torch.dtype) -> int:
        """Elements that must be mapped together, or between which strides are aligned."""
        return _ALIGNMENT if self._on_gpu is None else self._on_gpu.granule // dtype.itemsize


def _own_granules(strips: Sequence[tuple[int, int]], granule: int) -> dict[int, int]:
    """The granules that ``strips`` (start and length in elements) lie in, each with memory of its own."""
    found = {i for start, length in strips for i in range(start // granule, (start + length - 1) // granule + 1)}
    return {i: number for number, i in enumerate(sorted(found))}


def _shared_granules(starts: Sequence[int], length: int, granule: int) -> dict[int, int]:
    """The granules that rows lie in: a row's memory is that which it would have in a contiguous tensor."""
    found = {}
    for i, start in enumerate(starts):
        moved = (start - i * length) // granule
        for own in range(start // granule, (start + length - 1) // granule + 1):
            found[own] = own - moved
    return found


def stretched_strides(
    shape: tuple[int, ...], axis: int, alignment: int = _ALIGNMENT, *, least: int = 0, more: int = 0
) -> tuple[int, ...]:
    """Strides of a tensor that is contiguous but for one so wide that its last index passes 2^31 elements.

    ``axis`` has at least two indices. Those of the dimensions around it follow. ``alignment``: elements of which a row
    lies a multiple further than in a contiguous tensor. ``least``: elements that the stride has at least, also where
    there are so many indices that fewer would do. ``more``: by which it is wider than that.
    """
    contiguous = strided_layout(shape, "contiguous", 1).strides
    strides = list(contiguous)
    # Three rows pass 2^31 only, so that the stride itself fits into 32 bits and nothing but its product does not.
    reach = FAR >> 1 if shape[axis] == 3 else FAR
    enough = -(-reach // (shape[axis] - 1))
    strides[axis] = _aligned_alike(max(least, enough) + more, contiguous[axis], alignment)
    for outer in range(axis - 1, -1, -1):
        strides[outer] = _aligned_alike(strides[outer + 1] * shape[outer + 1], contiguous[outer], alignment)
    return tuple(strides)


def gapped_strides(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Strides of a tensor that is contiguous but for a gap of whole entries between those along ``axis``.

    The gap is a multiple of 16 elements, so that Triton has compiled what takes such strides: it makes another kernel
    of strides that are a multiple of 16 than of others.
    """
    strides = list(strided_layout(shape, "contiguous", 1).strides)
    strides[axis] += math.lcm(max(1, math.prod(shape[axis + 2 :])), _COMPILED_FOR)
    for outer in range(axis - 1, -1, -1):
        strides[outer] = strides[outer + 1] * shape[outer + 1]
    return tuple(strides)


def stretched_nbytes(shape: tuple[int, ...], axis: int, itemsize: int) -> int:
    """Most addresses for such a tensor and the gap below it."""
    return (span(shape, stretched_strides(shape, axis, least=_WIDE)) + _LARGEST_SIGNED) * itemsize


def _aligned_alike(least: int, stride: int, alignment: int) -> int:
    """At least ``least``, and rows so far apart are aligned as those that are ``stride`` apart."""
    return least + (stride - least) % alignment


def _wrong_ids(first: int, count: int) -> Iterator[tuple[int, int]]:
    """Pages, and how many on, that are read in place of ``count`` from ``first`` on if ids have 16 bits."""
    for signed in (False, True):
        for lands, pages in wrapped(first, count, _ID_BITS, signed=signed):
            if lands != first:
                yield lands, pages


def _page_strips(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Iterator[tuple[int, int]]:
    """Consecutive memory of as many pages as ``shape`` has, were they the first: start and length in elements.

    The gap behind the last page is no part of it: memory may end there.
    """
    if len(shape) > 1 and strides[1] > strides[0]:  # the first two dimensions are transposed
        length = span((shape[0], *shape[2:]), (strides[0], *strides[2:]))
        yield from ((offset + i * strides[1], length) for i in range(shape[1]))
    else:
        yield offset, span(shape, strides)


def _offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    found = [0]
    for size, stride in zip(shape, strides, strict=True):
        found = [start + i * stride for start in found for i in range(size)]
    return found


def _region(name: str, elements: int, dtype: torch.dtype, buffer: SparseBuffer) -> GuardedRegion:
    start, end = buffer.upper.data_ptr(), buffer.upper.data_ptr() + buffer.nbytes
    dtype_name = str(dtype).removeprefix("torch.")
    low = start - buffer.below
    return GuardedRegion(name, dtype_name, (elements,), dtype.itemsize, start, end, low, end, PAGE_RELOCATION.name)


def _decoy(length: int, dtype: torch.dtype) -> Tensor:
    """Finite, exact in all dtypes, and different from one element to the next."""
    return (torch.arange(length, device="cpu") * 37 % 61 - 30).to(dtype)


def _poison(tensor: Tensor) -> None:
    """NaN, or -1 in a tensor of integers."""
    bits(tensor).fill_(-1)
