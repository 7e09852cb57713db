"""Fills many tensors at once, element by element: what `attnfuzz.values.draws` does for one tensor.

Tensors of different shapes, dtypes and recipes lie one after another in a flat array. Each element knows its tensor,
row, head and dimension; so the number of operations does not depend on the number of tensors, and a GPU, which
takes longer to be told than to do, is told once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from attnfuzz.problems.hashing import fold
from attnfuzz.problems.recipes import KeyRecipe
from attnfuzz.problems.supports import MAX_HEAD_SIZE
from attnfuzz.values.draws import draw
from attnfuzz.values.transfer import on_device

__all__ = ["Block", "Recipe", "fill_blocks"]

Recipe = Literal["integers", "normal", "large", "signed", "level", "code"]
_RECIPES: tuple[Recipe, ...] = get_args(Recipe)
_HASHED: tuple[Recipe, ...] = ("integers", "normal", "large", "signed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A tensor ``[rows, num_heads, head_size]`` to fill with integers times ``2**exponent``.

    ``rows`` holds a number for each row: the hash state that its elements go on from (``integers``, ``normal`` and
    ``large``, as `draw` has them; ``signed``: 1 to 4 times the sign of the dimension), its factor of the sign
    pattern (``level``), or four numbers of 7 bits, a byte for each (``code``; the head is the third). ``sign_start`` is
    where the sign pattern starts among those of all blocks.
    """

    rows: Int64[Tensor, " rows"]
    recipe: Recipe
    num_heads: int
    head_size: int
    dtype: torch.dtype
    exponent: int = 0
    sign_start: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the tensor."""
        return len(self.rows), self.num_heads, self.head_size

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return len(self.rows) * self.num_heads * self.head_size


@dataclass(frozen=True, slots=True)
class _Elements:
    """For each element: the number of its row, its head and dimension, its sign and the power of two it counts in."""

    row: Int64[Tensor, " elements"]
    head: Int64[Tensor, " elements"]
    dim: Int64[Tensor, " elements"]
    sign_start: Int64[Tensor, " elements"]
    unit: Float32[Tensor, " elements"]


def fill_blocks(
    blocks: Sequence[Block], signs: Int64[Tensor, " all_dims"]
) -> list[Float[Tensor, "_rows _heads _head_size"]]:
    """The tensors of ``blocks``, on the device of ``signs``, which holds the sign patterns that they refer to.

    Takes some 60 operations and 100 bytes of memory for each element.
    """
    if not blocks:
        return []
    order = sorted(range(len(blocks)), key=lambda i: _RECIPES.index(blocks[i].recipe))
    ordered = [blocks[i] for i in order]
    numbers = _numbers(ordered, signs)
    by_dtype = {dtype: numbers.to(dtype) for dtype in {block.dtype for block in blocks}}
    found: list[Tensor] = [numbers] * len(blocks)
    for i, (start, end) in zip(order, itertools.pairwise(_starts(ordered)), strict=True):
        found[i] = by_dtype[blocks[i].dtype][start:end].view(blocks[i].shape)
    return found


def _numbers(ordered: Sequence[Block], signs: Int64[Tensor, " all_dims"]) -> Float32[Tensor, " elements"]:
    """The numbers of all blocks, which have been ordered by recipe: float32 holds what any dtype here holds."""
    at = _elements(ordered, signs.device)
    value = torch.cat([block.rows for block in ordered])[at.row]
    parts = []
    for recipe, part in _spans(ordered):
        if recipe == "code":
            parts.append(_decode(value[part], at.head[part], at.dim[part]))
            continue
        drawn = value[part]
        if recipe in _HASHED:
            words = fold(drawn, at.head[part] * MAX_HEAD_SIZE + at.dim[part])
            drawn = (words & 3) + 1 if recipe == "signed" else draw(words, cast(KeyRecipe, recipe))
        parts.append(drawn if recipe in _HASHED[:3] else drawn * signs[at.sign_start[part] + at.dim[part]])
    return torch.cat(parts).to(torch.float32).mul_(at.unit)


def _elements(blocks: Sequence[Block], device: torch.device) -> _Elements:
    first_row = [0, *itertools.accumulate(len(block.rows) for block in blocks)]
    starts = _starts(blocks)
    columns = (
        starts[:-1],
        first_row[:-1],
        [block.num_heads * block.head_size for block in blocks],
        [block.head_size for block in blocks],
        [block.sign_start for block in blocks],
        [block.numel for block in blocks],
    )
    table = on_device(torch.tensor(columns, dtype=torch.int64), device)
    units = on_device(torch.tensor([2.0**block.exponent for block in blocks]), device)
    block = torch.repeat_interleave(torch.arange(len(blocks), device=device), table[-1], output_size=starts[-1])
    start, row, width, head_size, sign_start = table[:-1].index_select(1, block).unbind()
    inside = torch.arange(starts[-1], device=device) - start
    in_block = inside // width
    column = inside.sub_(in_block * width)
    head = column // head_size
    return _Elements(row + in_block, head, column.sub_(head * head_size), sign_start, units[block])


def _starts(blocks: Sequence[Block]) -> list[int]:
    return [0, *itertools.accumulate(block.numel for block in blocks)]


def _spans(ordered: Sequence[Block]) -> Iterator[tuple[Recipe, slice]]:
    """Where the elements of each recipe are."""
    start = 0
    for recipe, blocks in itertools.groupby(ordered, key=lambda block: block.recipe):
        end = start + sum(block.numel for block in blocks)
        yield recipe, slice(start, end)
        start = end


def _decode(
    packed: Int64[Tensor, " elements"], head: Int64[Tensor, " elements"], dim: Int64[Tensor, " elements"]
) -> Int64[Tensor, " elements"]:
    return (((packed | (head & 127) << 16) >> ((dim & 3) << 3)) & 127) + 1
