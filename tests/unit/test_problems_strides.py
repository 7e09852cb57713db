"""Stride recipes: every element has its own address inside the storage, placed as the recipe says."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch

from attnfuzz.inputs.allocation import PlainAllocator
from attnfuzz.problems.recipes import STRIDE_KINDS, StrideKind
from attnfuzz.problems.shapes import last_dim_contiguous, strided_layout

SHAPES = [(5,), (1,), (3, 4), (1, 7), (2, 3, 16), (4, 2, 1, 13), (2, 2, 3, 2, 8), (3, 0, 4)]


def addresses(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> list[int]:
    indices = itertools.product(*map(range, shape))
    return [offset + sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in indices]


@pytest.mark.parametrize("kind", STRIDE_KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_elements_have_distinct_places_up_to_the_end(shape: tuple[int, ...], kind: StrideKind) -> None:
    """Two elements would share an address, lie outside, or leave a gap before the red zone behind them."""
    strides, storage_elements, offset = strided_layout(shape, kind, 2)
    places = addresses(shape, strides, offset)
    assert len(set(places)) == len(places)
    assert max(places, default=offset - 1) == storage_elements - 1
    assert min(places, default=offset) == offset


def test_strides_of_each_kind() -> None:
    """A recipe would test something else than its name says."""
    shape = (2, 3, 8)
    assert strided_layout(shape, "contiguous", 2) == ((24, 8, 1), 48, 0)
    assert strided_layout(shape, "offset", 2) == ((24, 8, 1), 49, 1)
    assert strided_layout(shape, "every_other", 2) == ((48, 16, 2), 95, 0)
    assert strided_layout(shape, "transposed", 2) == ((8, 16, 1), 48, 0)
    assert strided_layout(shape, "padded_rows", 2).strides == (33, 11, 1)
    assert strided_layout(shape, "outer_gap", 2) == ((32, 8, 1), 56, 0)
    assert strided_layout((5,), "outer_gap", 4).strides == (1,)
    assert strided_layout((5,), "transposed", 4).strides == (1,)
    assert strided_layout((5,), "padded_rows", 4).strides == (1,)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("row", [1, 2, 3, 4, 7, 8, 63, 64])
def test_padded_rows_break_alignment(row: int, itemsize: int) -> None:
    """Rows would stay aligned, so a kernel's vector loads would never meet an odd row."""
    stride = strided_layout((2, row), "padded_rows", itemsize).strides[0]
    assert stride - row in (3, 4)
    assert stride * itemsize % 8


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 16), (4, 2, 13), (3, 5, 2, 72), (2, 2, 3, 2, 8)], ids=str)
def test_an_outer_gap_is_what_a_slice_leaves(shape: tuple[int, ...], itemsize: int) -> None:
    """Gaps would be unlike those of a fused projection, or break the alignment that engines keep."""
    plain, gapped = (strided_layout(shape, kind, itemsize).strides for kind in ("contiguous", "outer_gap"))
    gap = gapped[0] - plain[0]
    assert gapped[1:] == plain[1:]
    assert gap > 0 == gap * itemsize % 16 == gap % plain[1]


@pytest.mark.parametrize("kind", STRIDE_KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_last_dim_contiguous_tells_the_truth(shape: tuple[int, ...], kind: StrideKind) -> None:
    """A kernel that needs a contiguous last dimension would be given one that is not, or be spared valid strides."""
    tensor = PlainAllocator().tensor("x", shape, torch.float32, strides=kind, role="input")
    assert last_dim_contiguous(shape, kind) == (tensor.stride(-1) == 1)


def test_unknown_kind_is_refused() -> None:
    """A misspelt recipe would pass as contiguous."""
    unchecked: Any = inspect.unwrap(strided_layout)  # the test run checks annotated types first
    with pytest.raises(ValueError, match="stride kind 'sideways' must be one of"):
        unchecked((2, 3), "sideways", 2)
