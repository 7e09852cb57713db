"""How a stride recipe places a tensor's elements in memory: plain integer arithmetic. Torch-free."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from attnfuzz.problems.recipes import STRIDE_KINDS, StrideKind

__all__ = ["StridedLayout", "last_dim_contiguous", "outer_gap", "strided_layout"]

_ALIGNMENT = 16
"""Bytes: of the widest load of one thread, and of the addresses that kernels written with it ask for."""


class StridedLayout(NamedTuple):
    """Strides, the storage they span and the first element's place in it, all counted in elements.

    The storage starts at an aligned address and ends with the tensor's last element.
    """

    strides: tuple[int, ...]
    storage_elements: int
    offset: int


def strided_layout(shape: tuple[int, ...], kind: StrideKind, itemsize: int) -> StridedLayout:
    """Place a tensor of ``shape`` as ``kind`` says.

    * ``outer_gap``: a slice of a tensor that is longer in its second dimension, as q is of the projection of q, k and
      v, and a page of a cache that several layers share: the outermost dimension's indices are further apart than they
      need be, by a multiple of 16 bytes; everything inside is contiguous.
    * ``padded_rows``: the rows (last dimension) are 3 or 4 elements further apart than they are long.
    * ``transposed``: the two outermost dimensions swap their places in memory.
    * ``offset``: contiguous, but one element after an aligned address.
    * ``every_other``: the last dimension has stride 2.

    A vector has no rows and nothing to swap: these kinds leave it contiguous. ``itemsize`` (bytes) decides about the
    gaps: that of ``outer_gap`` keeps the alignment that vector loads need, that of ``padded_rows`` breaks it.
    """
    if kind not in STRIDE_KINDS:
        raise ValueError(f"stride kind {kind!r} must be one of {STRIDE_KINDS}")
    return _strided_layout(shape, kind, itemsize)


@lru_cache(maxsize=1 << 12)  # asked for several times for each tensor of a case
def _strided_layout(shape: tuple[int, ...], kind: StrideKind, itemsize: int) -> StridedLayout:
    strides = _strides(shape, kind, itemsize)
    offset = 1 if kind == "offset" else 0
    if math.prod(shape) == 0:
        return StridedLayout(strides, offset, offset)
    last_element = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return StridedLayout(strides, offset + last_element + 1, offset)


def last_dim_contiguous(shape: tuple[int, ...], kind: StrideKind) -> bool:
    """Whether ``kind`` leaves the last dimension of a tensor of ``shape`` with stride 1."""
    return strided_layout(shape, kind, 2).strides[-1] == 1


def outer_gap(entry: int, itemsize: int) -> int:
    """The fewest entries of so many elements, at least one, that are a multiple of 16 bytes; counted in elements."""
    return math.lcm(max(1, entry) * itemsize, _ALIGNMENT) // itemsize


def _strides(shape: tuple[int, ...], kind: StrideKind, itemsize: int) -> tuple[int, ...]:
    if kind == "every_other":
        return tuple(2 * stride for stride in _contiguous(shape))
    if kind == "outer_gap" and len(shape) > 1:
        strides = _contiguous(shape)
        return (strides[0] + outer_gap(math.prod(shape[2:]), itemsize), *strides[1:])
    if kind == "padded_rows" and len(shape) > 1:
        return (*_contiguous((*shape[:-1], shape[-1] + _row_gap(shape[-1], itemsize)))[:-1], 1)
    if kind == "transposed" and len(shape) > 1:
        first, second, *rest = _contiguous((shape[1], shape[0], *shape[2:]))
        return (second, first, *rest)
    return _contiguous(shape)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * max(1, shape[i])
    return tuple(strides)


def _row_gap(row: int, itemsize: int) -> int:
    """Elements between rows, at least 3, after which the next row is not aligned to 8 bytes."""
    return 3 if (row + 3) * itemsize % 8 else 4
