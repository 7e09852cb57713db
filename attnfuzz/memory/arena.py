"""The memory of one kernel run: every tensor between red zones, everything unused poisoned, stray writes found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Int64, Shaped, UInt8
from torch import Tensor

from attnfuzz.memory.patterns import POISON_BYTES, Fill, bits, holds_prefill, prefill_
from attnfuzz.problems.recipes import StrideKind
from attnfuzz.problems.shapes import Role, strided_layout

ALIGNMENT = 256  # bytes: beyond what any vector load asks for
_SMALLEST_ZONE = 256
_LARGEST_ZONE = 1 << 16


class Span(NamedTuple):
    """Bytes ``start`` to ``end`` hold a tensor, gaps between its elements included; ``zone`` bytes either side none."""

    start: int
    end: int
    zone: int


class Cursor:
    """Places one tensor after another; ``used`` bytes are taken so far."""

    def __init__(self) -> None:
        self.used = 0

    def place(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, shift: int = 0) -> Span:
        """The next place, for a tensor that starts ``shift`` elements after an aligned address."""
        nbytes = span(shape, strides) * itemsize
        zone = _zone_bytes(nbytes, shape)
        start = aligned(self.used + zone) + shift * itemsize
        self.used = start + nbytes + zone
        return Span(start, start + nbytes, zone)


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last one, gaps between included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _element_offsets(shape: tuple[int, ...], strides: tuple[int, ...], *, device: torch.device) -> Int64[Tensor, "..."]:
    """How far each element lies from the first one, in elements."""
    found = torch.zeros((), dtype=torch.int64, device=device)
    for size, stride in zip(shape, strides, strict=True):
        found = found.unsqueeze(-1) + stride * torch.arange(size, device=device)
    return found


def aligned(offset: int) -> int:
    """``offset``, rounded up."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _zone_bytes(nbytes: int, shape: tuple[int, ...]) -> int:
    """One step of the first dimension, so that a row written too far is still next to its tensor."""
    row = nbytes // max(1, shape[0]) if shape else nbytes
    return min(max(_SMALLEST_ZONE, aligned(row)), _LARGEST_ZONE)


ChunkSource = Callable[[int], UInt8[Tensor, " nbytes"]]
"""Gives a poisoned stretch of at least so many bytes, aligned and a multiple of 8 long."""


@dataclass(frozen=True, slots=True)
class Region:
    """One tensor's place in a chunk: bytes `start` to `end`, with `zone` bytes of red zone on either side.

    `where`: the elements of an output that may change; None for all of them.
    """

    name: str
    role: Role
    chunk: int
    start: int
    end: int
    zone: int
    tensor: Tensor
    where: Bool[Tensor, "..."] | None = None

    def within(self, other: UInt8[Tensor, " nbytes"]) -> Tensor:
        """The tensor's elements in `other`, a copy of its chunk."""
        first = (other.storage_offset() + self.start) // self.tensor.dtype.itemsize
        return other.view(self.tensor.dtype).as_strided(self.tensor.shape, self.tensor.stride(), first)


class Arena:
    """Allocates tensors out of poisoned chunks and says later what changed that had no business to.

    A chunk is filled with poison as a whole, so that dead elements, gaps between strided elements, spare pages and red
    zones cost one fill, and finding a stray write costs one comparison.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        poison: Fill,
        prefill: Fill,
        capacity: int = 1 << 16,
        source: ChunkSource | None = None,
    ) -> None:
        """`capacity`: bytes of the first chunk; what does not fit goes to a further one. `source`: of chunks."""
        self.device = torch.device(device)
        self.poison = poison
        self.prefill = prefill
        self.regions: list[Region] = []
        self._capacity = capacity
        self._source = source or self._new_chunk
        self._chunks: list[UInt8[Tensor, " nbytes"]] = []
        self._snapshots: list[UInt8[Tensor, " nbytes"]] | None = None
        self._cursor = Cursor()

    @classmethod
    def sealed(
        cls,
        chunk: UInt8[Tensor, " nbytes"],
        snapshot: UInt8[Tensor, " nbytes"],
        regions: Sequence[Region],
        *,
        poison: Fill,
        prefill: Fill,
    ) -> "Arena":
        """An arena of one chunk that has been filled elsewhere, with what it held when it was sealed."""
        arena = cls(chunk.device, poison=poison, prefill=prefill)
        arena._chunks, arena._snapshots = [chunk], [snapshot]
        arena.regions.extend(regions)
        return arena

    @property
    def is_full(self) -> bool:
        """Whether further tensors had better be made elsewhere."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.numel() for chunk in self._chunks)

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, strides: StrideKind = "contiguous", role: Role
    ) -> Tensor:
        """A tensor of poison, or of pre-fill if its `role` is "output"; `strides` as in `strided_layout`."""
        layout = strided_layout(shape, strides, dtype.itemsize)
        return self.strided(name, shape, layout.strides, dtype, role=role, shift=layout.offset)

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
        """As `tensor`, with strides in elements, starting `shift` elements after an aligned address.

        Without `prefill` the caller is about to write every element.
        """
        place = self._reserve(shape, strides, dtype.itemsize, shift)
        chunk = self._chunks[-1]
        # counted from the start of the storage, which a chunk may share with others
        first = (chunk.storage_offset() + place.start) // dtype.itemsize
        view = chunk.view(dtype).as_strided(shape, strides, first)
        if role == "output" and prefill:
            prefill_(view, self.prefill)
        self.regions.append(Region(name, role, len(self._chunks) - 1, *place, view))
        return view

    def only_changes(self, name: str, where: Bool[Tensor, "..."]) -> None:
        """Forbid changes of the output `name` but for elements of `where` once the arena is sealed."""
        i = next(i for i, region in enumerate(self.regions) if region.name == name)
        self.regions[i] = replace(self.regions[i], where=where.to(self.device))

    def rename(self, tensor: Shaped[Tensor, "..."], name: str) -> None:
        """Call the region that `tensor` starts in `name`, if it is one of this arena's."""
        address = tensor.data_ptr()
        for i, region in enumerate(self.regions):
            if region.tensor.data_ptr() == address and region.tensor.numel():
                self.regions[i] = replace(region, name=name)

    def seal(self) -> None:
        """Remember every byte: from here on only outputs may change. Unsealed, only outputs may differ from poison."""
        self._snapshots = [chunk.clone() for chunk in self._chunks]

    def damage(self) -> Bool[Tensor, ""]:
        """Whether a byte changed that is not an element of an output; on the arena's device, without waiting for it."""
        differs = [(_words(chunk) != _words(expected)).any() for chunk, expected in self.compared()]
        return torch.stack(differs).any() if differs else torch.zeros((), dtype=torch.bool, device=self.device)

    def compared(self) -> list[tuple[UInt8[Tensor, " nbytes"], UInt8[Tensor, " nbytes"]]]:
        """Each chunk beside what it should hold, in which outputs have been overwritten by what they hold now."""
        snapshots = self._snapshots
        if snapshots is None:
            snapshots = [torch.full_like(chunk, POISON_BYTES[self.poison]) for chunk in self._chunks]
        for region in self.regions:
            if region.role == "output":
                expected = region.within(snapshots[region.chunk])
                if region.where is None:
                    expected.copy_(region.tensor)
                else:
                    bits(expected).copy_(torch.where(region.where, bits(region.tensor), bits(expected)))
        return list(zip(self._chunks, snapshots, strict=True))

    def is_written_with(self, name: str, strides: tuple[int, ...]) -> bool:
        """Whether memory looks as if all of output `name` had been written, from its first element on, with `strides`.

        Its own elements tell by their pre-fill; around it, what no other output covers tells.
        """
        region = next((one for one in self.regions if one.name == name and one.role == "output"), None)
        if region is None:
            return False
        chunk, expected = self.compared()[region.chunk]
        tensor = region.tensor
        size, shape = tensor.dtype.itemsize, tuple(tensor.shape)
        first = region.start // size
        is_written = (chunk != expected).view(-1, size).any(1)
        own = first + _element_offsets(shape, tensor.stride(), device=self.device)
        is_written[own] = ~holds_prefill(tensor, self.prefill)
        is_hidden = torch.zeros_like(chunk)
        for other in self.regions:
            if other.role == "output" and other.chunk == region.chunk and other is not region:
                bits(other.within(is_hidden)).fill_(-1)
        there = first + _element_offsets(shape, strides, device=self.device).flatten()
        should_be = torch.zeros_like(is_written)
        should_be[there[(there >= 0) & (there < len(should_be))]] = True
        return bool(((is_written == should_be) | is_hidden.view(-1, size).any(1)).all())

    def on_host(self, copy: Callable[[Shaped[Tensor, "..."]], Shaped[Tensor, "..."]] = Tensor.cpu) -> "Arena":
        """The arena as it is now, in copies that `copy` makes of its chunks; itself if it is on the host."""
        if self.device.type == "cpu":
            return self
        found = Arena("cpu", poison=self.poison, prefill=self.prefill)
        found._chunks = [copy(chunk) for chunk in self._chunks]
        if self._snapshots is not None:
            found._snapshots = [snapshot.cpu() for snapshot in self._snapshots]
        found.regions = [
            replace(
                region,
                tensor=region.within(found._chunks[region.chunk]),
                where=None if region.where is None else region.where.cpu(),
            )
            for region in self.regions
        ]
        return found

    def _reserve(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, shift: int) -> Span:
        """A tensor's place in the last chunk, a new one if it does not fit into the present one."""
        place = self._cursor.place(shape, strides, itemsize, shift)
        if not self._chunks or self._cursor.used > self._chunks[-1].numel():
            self._cursor = Cursor()
            place = self._cursor.place(shape, strides, itemsize, shift)
            self._chunks.append(self._source(aligned(max(self._capacity, self._cursor.used))))
        return place

    def _new_chunk(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        return torch.full((nbytes,), POISON_BYTES[self.poison], dtype=torch.uint8, device=self.device)


def _words(chunk: UInt8[Tensor, " nbytes"]) -> Shaped[Tensor, " nwords"]:
    return chunk.view(torch.int64)


Where = Literal["before", "after", "inside", "between"]


@dataclass(frozen=True, slots=True)
class Violation:
    """Memory that changed and should not have.

    `where`: in the red zone `before` or `after` the tensor, `inside` it (an input), or `between` its strided elements.
    `elements`: how many elements' worth of bytes changed. `distance`: elements from the tensor's first or last element
    to the nearest changed one, 1 for its neighbour (0 unless before or after). `index`: the first changed element
    (inside only). `shape` and `dtype` are the tensor's.
    """

    name: str
    role: Role
    where: Where
    elements: int
    distance: int
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


def violations(arena: Arena) -> list[Violation]:
    """Every stray write that `arena.damage()` noticed: outputs' surroundings first, then modified inputs."""
    found: list[Violation] = []
    for i, (chunk, expected) in enumerate(arena.compared()):
        changed = (chunk != expected).cpu()
        if changed.any():
            regions = [region for region in arena.regions if region.chunk == i]
            found += [*_within(regions, changed), *_around(regions, changed)]
    return sorted(found, key=lambda violation: (violation.where == "inside", violation.role == "input"))


def _within(regions: list[Region], changed: Bool[Tensor, " nbytes"]) -> list[Violation]:
    found = []
    for region in regions:
        view = region.tensor
        size = view.dtype.itemsize
        elements = bits(region.within(changed.view(torch.uint8)))
        hits = elements.nonzero()
        if len(hits):
            found.append(_violation(region, "inside", len(hits), index=tuple(hits[0].tolist())))
            elements.zero_()
        between = int(changed[region.start : region.end].sum())
        if between:
            found.append(_violation(region, "between", -(-between // size)))
    return found


def _around(regions: list[Region], changed: Bool[Tensor, " nbytes"]) -> list[Violation]:
    found = []
    first, last = regions[0], regions[-1]
    found += _zone(first, "before", changed, 0, first.start)
    for left, right in pairwise(regions):
        border = _border(left, right)
        found += _zone(left, "after", changed, left.end, border)
        found += _zone(right, "before", changed, border, right.start)
    found += _zone(last, "after", changed, last.end, changed.numel())
    return found


def _border(left: Region, right: Region) -> int:
    """Where `left`'s surroundings end: only outputs are written to, so a neighbour that is one has the blame."""
    if left.role == right.role:
        return left.end + left.zone
    return right.start if left.role == "output" else left.end


def _zone(region: Region, where: Where, changed: Bool[Tensor, " nbytes"], start: int, end: int) -> list[Violation]:
    hits = changed[start:end].nonzero()
    if not len(hits):
        return []
    size = region.tensor.dtype.itemsize
    nearest = int(hits[0]) + start - region.end if where == "after" else region.start - (int(hits[-1]) + start) - 1
    return [_violation(region, where, -(-len(hits) // size), distance=nearest // size + 1)]


def _violation(
    region: Region, where: Where, elements: int, *, distance: int = 0, index: tuple[int, ...] = ()
) -> Violation:
    shape, dtype = tuple(region.tensor.shape), str(region.tensor.dtype).removeprefix("torch.")
    return Violation(region.name, region.role, where, elements, distance, index, shape, dtype)
