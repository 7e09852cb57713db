"""Sequences of which some row sees no key of a tile that others of its block see, or that a kernel may begin with.

A kernel takes query tokens in blocks and keys in tiles. The first tile of a block may lie before the window of a later
row, its last tile behind the causal edge of an earlier one; a kernel that begins at the first key meets whole tiles
before any window; and what goes wrong in all blocks but the first needs more query tokens than fill one. In lengths
that are drawn around the ends of tiles alone each of these comes about once in hundreds of cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

from attnfuzz.problems.boundaries import MASKED_TILES
from attnfuzz.strategies.decisions import Decisions

MASKED_TILES_BYTES = 4
_Way = Literal["tiles", "blocks"]
_WAYS: tuple[_Way | None, ...] = (None, None, "tiles", "blocks")
_WAYS_WITH_WINDOW: tuple[_Way | None, ...] = (None, None, "tiles", "tiles", "blocks")
_WEIGHT_OF_KNOWN = 4
_MULTIPLES = (1, 2)
_ROWS_BEFORE = (1, 1, 2, 5, 14)
_ROWS_AFTER = (0, 0, 1, 3, 7)
_OF_SECOND_BLOCK = (1, 2, 3, 8, 15)
_CONTEXTS = (0, 0, 1, 5, 16)
_LEAST_TILE = 16
"""Keys of a tile that a kernel may have whatever its pages are; of smaller pages it may take one at a time."""


class Placed(NamedTuple):
    """A sequence whose rows part at a tile or block that begins with key ``edge``.

    ``query_len`` is 1 in the decode problems.
    """

    seq_len: int
    query_len: int
    edge: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """``window``: keys that a query sees, if not all. ``max_query_len``: None where each sequence has one query token.

    ``tiles``: sizes that the kernel is known to have, none of them if none is. ``work`` counts, for each query token,
    tiles of ``tile`` keys.
    """

    window: int | None
    max_len: int
    max_query_len: int | None
    tiles: tuple[int, ...]
    work: int
    tile: int


def decide_placed(decisions: Decisions, limits: RowLimits) -> Placed | None:
    """None in two of five cases with a window, in half of the others, and where no such sequence keeps the limits."""
    way = decisions.pick(_WAYS if limits.window is None else _WAYS_WITH_WINDOW)
    by_tile = () if way is None else _by_tile(way, limits)
    return decisions.pick(decisions.pick(by_tile)) if by_tile else None


@lru_cache(maxsize=4096)
def _by_tile(way: _Way, limits: RowLimits) -> tuple[tuple[Placed, ...], ...]:
    """Sizes that keep the limits, for each size of a tile, or of a block."""
    known = [tile for tile in limits.tiles if MASKED_TILES[0] <= tile <= MASKED_TILES[-1]]
    sizes = (*known * _WEIGHT_OF_KNOWN, *MASKED_TILES)
    found = (tuple(_with_tile(size, limits) if way == "tiles" else _with_block(size, limits)) for size in sizes)
    return tuple(of_tile for of_tile in found if of_tile)


def _with_tile(tile: int, limits: RowLimits) -> list[Placed]:
    window = limits.window if limits.window is not None and limits.window + tile <= limits.max_len else None
    if window is None and limits.max_query_len is None:
        return []
    found = []
    for multiple, before, after in product(_MULTIPLES, _ROWS_BEFORE, _ROWS_AFTER):
        edge = multiple * tile  # where the window of a row begins, or the first key past the causal edge of another
        seq_len = edge + after + (window or 1)
        query_len = before + after + 1 if limits.max_query_len is not None else 1
        if _fits(seq_len, query_len, limits.tile, limits):
            found.append(Placed(seq_len, query_len, edge))
    return found


def _with_block(block: int, limits: RowLimits) -> list[Placed]:
    """Query tokens that fill a block, and part of another one or all of it, behind some context."""
    tile = block if block in limits.tiles and limits.tile >= _LEAST_TILE else limits.tile
    found = []
    for further, context in product(_OF_SECOND_BLOCK, _CONTEXTS):
        query_len = block + min(further, block)
        if _fits(context + query_len, query_len, tile, limits):
            found.append(Placed(context + query_len, query_len, context + block))
    return found


def _fits(seq_len: int, query_len: int, tile: int, limits: RowLimits) -> bool:
    most = 1 if limits.max_query_len is None else min(seq_len, limits.max_query_len)
    return query_len <= most and seq_len <= limits.max_len and query_len * -(-seq_len // tile) <= limits.work
