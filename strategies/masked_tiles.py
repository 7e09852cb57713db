"""Sequences of which some row sees no key of a tile that others of its block see, or that a kernel may begin with.

A kernel takes query tokens in blocks and keys in tiles. The first tile of a block may lie before the window of a later
row, its last tile behind the causal edge of an earlier one; a kernel that begins at the first key meets whole tiles
before any window. In lengths that are drawn around the ends of tiles alone this comes about once in hundreds of cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from attnfuzz.problems.boundaries import MASKED_TILES
from attnfuzz.strategies.decisions import Decisions

__all__ = ["MASKED_TILES_BYTES", "Placed", "RowLimits", "decide_placed"]

MASKED_TILES_BYTES = 4
_IS_PLACED = (False, False, False, True)
_IS_PLACED_BY_WINDOW = (False, True)
_WEIGHT_OF_KNOWN = 4
_MULTIPLES = (1, 2)
_ROWS_BEFORE = (1, 1, 2, 5, 14)
_ROWS_AFTER = (0, 0, 1, 3, 7)


class Placed(NamedTuple):
    """A sequence whose rows part at a tile that begins with key ``edge``; ``query_len`` is 1 in the decode problems."""

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
    """None in half of the cases with a window, in three of four others, and where no such sequence keeps the limits."""
    is_placed = decisions.pick(_IS_PLACED if limits.window is None else _IS_PLACED_BY_WINDOW)
    by_tile = _by_tile(limits)
    if not is_placed or not by_tile:
        return None
    return decisions.pick(decisions.pick(by_tile))


@lru_cache(maxsize=4096)
def _by_tile(limits: RowLimits) -> tuple[tuple[Placed, ...], ...]:
    """What keeps the limits, for each size of a tile."""
    known = [tile for tile in limits.tiles if MASKED_TILES[0] <= tile <= MASKED_TILES[-1]]
    found = (tuple(_with_tile(tile, limits)) for tile in (*known * _WEIGHT_OF_KNOWN, *MASKED_TILES))
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
        fits = query_len <= min(seq_len, limits.max_query_len or 1) and seq_len <= limits.max_len
        if fits and query_len * -(-seq_len // limits.tile) <= limits.work:
            found.append(Placed(seq_len, query_len, edge))
    return found
