"""The memory of one kernel run: every tensor between red zones, everything unused poisoned."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Shaped, UInt8
from torch import Tensor

from attnfuzz.memory.patterns import POISON_BYTES, Fill, prefill_
from attnfuzz.problems.recipes import StrideKind
from attnfuzz.problems.shapes import Role
from attnfuzz.problems.strides import strided_layout

__all__ = ["Arena", "Region"]

_ALIGNMENT = 256  # bytes: beyond what any vector load asks for
_SMALLEST_ZONE = 256
_LARGEST_ZONE = 1 << 16


@dataclass(frozen=True, slots=True)
class Region:
    """One tensor's place in a chunk: bytes `start` to `end`, with `zone` bytes of red zone on either side."""

    name: str
    role: Role
    chunk: int
    start: int
    end: int
    zone: int
    tensor: Tensor


class Arena:
    """Allocates tensors out of poisoned chunks and says later what changed that had no business to.

    A chunk is filled with poison as a whole, so that dead elements, gaps between strided elements, spare pages and red
    zones cost one fill, and finding a stray write costs one comparison.
    """

    def __init__(self, device: torch.device | str, *, poison: Fill, prefill: Fill, capacity: int = 1 << 16) -> None:
        """`capacity`: bytes of the first chunk; what does not fit goes to a further one."""
        self.device = torch.device(device)
        self.poison = poison
        self.prefill = prefill
        self.regions: list[Region] = []
        self._capacity = capacity
        self._chunks: list[UInt8[Tensor, " nbytes"]] = []
        self._snapshots: list[UInt8[Tensor, " nbytes"]] | None = None
        self._used = 0

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
    ) -> Tensor:
        """As `tensor`, with strides in elements, starting `shift` elements after an aligned address."""
        nbytes = _span(shape, strides) * dtype.itemsize
        zone = _zone_bytes(nbytes, shape)
        start = self._reserve(shift * dtype.itemsize, nbytes, zone)
        chunk = len(self._chunks) - 1
        view = self._chunks[chunk].view(dtype).as_strided(shape, strides, start // dtype.itemsize)
        if role == "output":
            prefill_(view, self.prefill)
        self.regions.append(Region(name, role, chunk, start, start + nbytes, zone, view))
        return view

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
                dtype, view = region.tensor.dtype, region.tensor
                expected = snapshots[region.chunk].view(dtype)
                expected.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(view)
        return list(zip(self._chunks, snapshots, strict=True))

    def _reserve(self, lead: int, nbytes: int, zone: int) -> int:
        """The first byte of a tensor of `nbytes`, `lead` bytes past an aligned one, in the last chunk."""
        start = _aligned(self._used + zone) + lead
        if not self._chunks or start + nbytes + zone > self._chunks[-1].numel():
            start = _aligned(zone) + lead
            size = _aligned(max(self._capacity, start + nbytes + zone))
            self._chunks.append(torch.full((size,), POISON_BYTES[self.poison], dtype=torch.uint8, device=self.device))
        self._used = start + nbytes + zone
        return start


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last one, gaps between included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _zone_bytes(nbytes: int, shape: tuple[int, ...]) -> int:
    """One step of the first dimension, so that a row written too far is still next to its tensor."""
    row = nbytes // max(1, shape[0]) if shape else nbytes
    return min(max(_SMALLEST_ZONE, _aligned(row)), _LARGEST_ZONE)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _words(chunk: UInt8[Tensor, " nbytes"]) -> Shaped[Tensor, " nwords"]:
    return chunk.view(torch.int64)
