"""Fills the tensors of many cases, those that are made alike together: what `attnfuzz.values.draws` does for one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from jaxtyping import Float, Int, Int32, Int64
from torch import Tensor

from attnfuzz.problems.limits import HASH_CHUNK_ELEMENTS
from attnfuzz.values.draws import DrawnRecipe, draw, element_words, exact
from attnfuzz.values.host_draws import HashedRecipe, draw_on_host, exact_on_host

__all__ = ["Block", "Recipe", "fill_blocks"]

Recipe = DrawnRecipe | Literal["signed", "level", "code"]

_HOST_CHUNK_ELEMENTS = 1 << 16
"""On a CPU hash words should stay in its cache."""


class _Kind(NamedTuple):
    """What blocks have in common that are filled together."""

    recipe: Recipe
    num_heads: int
    head_size: int
    dtype_name: str
    exponent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A tensor ``[rows, num_heads, head_size]`` to fill with integers times ``2**exponent``.

    ``rows`` holds a number for each row: the hash state that its elements go on from (those that
    `draw` makes integers for; ``signed``: 1 to 4 times the sign of the dimension), its factor of the sign
    pattern (``level``), or three numbers of 7 bits, a byte for each and one for the head (``code``). ``signs`` is the
    pattern.
    """

    rows: Int64[Tensor, " rows"]
    signs: Int32[Tensor, " head_size"] | None = None
    recipe: Recipe
    num_heads: int
    head_size: int
    dtype: torch.dtype
    exponent: int = 0

    @property
    def kind(self) -> _Kind:
        """What it has in common with others."""
        return _Kind(self.recipe, self.num_heads, self.head_size, str(self.dtype), self.exponent)


def fill_blocks(blocks: Sequence[Block]) -> list[Float[Tensor, "_rows _heads _head_size"]]:
    """The tensors of ``blocks``, on the device of their rows. Blocks of one kind cost as many operations as one."""
    found: dict[int, Tensor] = {}
    order = sorted(range(len(blocks)), key=lambda i: blocks[i].kind)
    for _, group in itertools.groupby(order, key=lambda i: blocks[i].kind):
        alike = list(group)
        filled = _fill_alike([blocks[i] for i in alike])
        found |= zip(alike, torch.split(filled, [len(blocks[i].rows) for i in alike]), strict=True)
    return [found[i] for i in range(len(blocks))]


def _fill_alike(blocks: Sequence[Block]) -> Float[Tensor, "rows num_heads head_size"]:
    """The tensors of blocks of one kind, one after another."""
    first = blocks[0]
    rows = torch.cat([block.rows for block in blocks]) if len(blocks) > 1 else first.rows
    if not len(rows):
        return rows.new_empty((0, first.num_heads, first.head_size), dtype=first.dtype)
    if first.recipe == "code":
        codes = _exact(_decode(rows, first.num_heads), first)
        return codes.repeat(1, 1, -(-first.head_size // 4))[..., : first.head_size].contiguous()
    signs = _signs_of_rows(blocks) if first.recipe in ("signed", "level") else None
    if first.recipe == "level" and signs is not None:
        levels = _exact(rows.int()[:, None] * signs, first)
        return levels[:, None, :].expand(-1, first.num_heads, -1).contiguous()
    at_once = HASH_CHUNK_ELEMENTS if rows.is_cuda else _HOST_CHUNK_ELEMENTS
    chunk = max(1, at_once // (first.num_heads * first.head_size))
    if len(rows) <= chunk:
        return _draw(first, rows, signs)
    out = rows.new_empty((len(rows), first.num_heads, first.head_size), dtype=first.dtype)
    for start in range(0, len(rows), chunk):
        part = slice(start, start + chunk)
        out[part] = _draw(first, rows[part], None if signs is None else signs[part])
    return out


def _draw(
    kind: Block, rows: Int64[Tensor, " rows"], signs: Int32[Tensor, "rows head_size"] | None
) -> Float[Tensor, "rows num_heads head_size"]:
    if not rows.is_cuda:
        recipe = cast(HashedRecipe, kind.recipe)
        return _exact(draw_on_host(rows, recipe, kind.num_heads, kind.head_size, signs), kind)
    words = element_words(rows, kind.num_heads, kind.head_size)
    if signs is not None:
        return _exact(((words & 3) + 1) * signs[:, None], kind)
    return _exact(draw(words, cast(DrawnRecipe, kind.recipe)), kind)


def _exact(integers: Int[Tensor, "*shape"], kind: Block) -> Float[Tensor, "*shape"]:
    return (exact if integers.is_cuda else exact_on_host)(integers, kind.dtype, kind.exponent)


def _signs_of_rows(blocks: Sequence[Block]) -> Int32[Tensor, "rows head_size"]:
    """The sign pattern for each row."""
    rows = sum(len(block.rows) for block in blocks)
    if all(block.signs is blocks[0].signs for block in blocks):
        signs = cast(Tensor, blocks[0].signs)
        return signs.expand(rows, len(signs))
    return torch.cat([cast(Tensor, block.signs).expand(len(block.rows), -1) for block in blocks])


def _decode(packed: Int64[Tensor, " rows"], num_heads: int) -> Int32[Tensor, "rows num_heads 4"]:
    """The four numbers of each row and head: 1 to 128, the third for the head."""
    heads = (torch.arange(num_heads, device=packed.device, dtype=torch.int32) & 127) << 16
    shifts = torch.arange(0, 32, 8, device=packed.device, dtype=torch.int32)
    return ((packed.int()[:, None] | heads)[..., None] >> shifts & 127) + 1
