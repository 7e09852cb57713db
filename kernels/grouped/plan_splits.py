"""How many programs share a sequence, and whether by the lengths of all."""

from __future__ import annotations

_MANY_TILES = 20
"""In a split of the longest sequence. A program of an H100 takes about 1.4 us for one.

Block tables have room for whole pages: 512 tokens, which are 16 tiles, are up to 17 there with pages of 272."""
MOST_COUNTED = 4096
"""Sequences whose tiles a program counts. A batch of more fills any GPU many times over."""
_COUNTED = tuple(64 << 2 * i for i in range(6))
"""At once. Each size is a compilation, and batches change with every step of a server."""


def plan_splits(
    num_seqs: int, head_programs: int, tiles: int, processors: int, fill: int, balanced: bool | None = None
) -> tuple[int, bool]:
    """How many splits, and whether they are shared out by length: then of all sequences, otherwise of each.

    ``tiles``: of the longest sequence that there is room for; ``fill``: programs that each multiprocessor should get.
    """
    each = max(1, min(fill * processors // max(1, num_seqs * head_programs), tiles))
    if balanced is None:
        balanced = 1 < num_seqs <= MOST_COUNTED and tiles > _MANY_TILES * each
    if not balanced:
        return each, False
    return max(1, fill * processors // max(1, head_programs)), True


def sequences_counted(num_seqs: int) -> int:
    """``BLOCK_S`` of a launch that shares splits out."""
    return next(size for size in _COUNTED if size >= num_seqs)
