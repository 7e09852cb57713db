"""Where tensors go in a stretch of memory, with red zones between them: integers only."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ALIGNMENT", "Cursor", "Place", "aligned", "span"]

ALIGNMENT = 256  # bytes: beyond what any vector load asks for
_SMALLEST_ZONE = 256
_LARGEST_ZONE = 1 << 16


class Place(NamedTuple):
    """Bytes ``start`` to ``end`` hold a tensor, gaps between its elements included; ``zone`` bytes either side none."""

    start: int
    end: int
    zone: int


class Cursor:
    """Places one tensor after another; ``used`` bytes are taken so far."""

    def __init__(self) -> None:
        self.used = 0

    def place(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, shift: int = 0) -> Place:
        """The next place, for a tensor that starts ``shift`` elements after an aligned address."""
        nbytes = span(shape, strides) * itemsize
        zone = _zone_bytes(nbytes, shape)
        start = aligned(self.used + zone) + shift * itemsize
        self.used = start + nbytes + zone
        return Place(start, start + nbytes, zone)


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last one, gaps between included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def aligned(offset: int) -> int:
    """``offset``, rounded up."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _zone_bytes(nbytes: int, shape: tuple[int, ...]) -> int:
    """One step of the first dimension, so that a row written too far is still next to its tensor."""
    row = nbytes // max(1, shape[0]) if shape else nbytes
    return min(max(_SMALLEST_ZONE, aligned(row)), _LARGEST_ZONE)
