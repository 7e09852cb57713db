"""Where attention kernels change what they do: ends of pages, tiles and splits. Torch-free integers.

A *step* is a number of tokens that something advances by: the page size, or a tile size among the kernel's options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from attnfuzz.problems.attention import AttentionCase
from attnfuzz.problems.supports import OptionValue

DEFAULT_TILES = (16, 32, 64)
"""Tile sizes to expect of a kernel that does not name its own as an option."""

MASKED_TILES = (16, 32, 64, 128)
"""Sizes of tiles that rows may see no key of: a row that lies whole tiles away shows in larger ones as well."""

QUERY_TILE = 16
"""Rows of a matrix instruction, which kernels fill with query tokens, or with those of a group of query heads."""

_LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg", "num_sms", "num_combined"})
_NEAR = (-1, 0, 1)
_MULTIPLES = (1, 2, 3)


def tile_sizes(options: Mapping[str, OptionValue]) -> tuple[int, ...]:
    """Integer options that may be a number of tokens: every one that is neither a split count nor a launch setting."""
    return tuple(value for name, value in _counts(options) if "split" not in name and name not in _LAUNCH_OPTIONS)


def split_count(options: Mapping[str, OptionValue]) -> int:
    """The option that says into how many splits a sequence is cut; 1 without one."""
    return max([1, *(value for name, value in _counts(options) if "split" in name)])


def num_splits_of(case: AttentionCase) -> int:
    return case.partial_states or split_count(case.options)


def steps_of(case: AttentionCase) -> tuple[int, ...]:
    """Page size and tile sizes that the case itself names."""
    pages = (case.page_size,) if case.page_size else ()
    return tuple(dict.fromkeys((*pages, *tile_sizes(case.options))))


def has_empty_split(seq_len: int, num_splits: int) -> bool:
    """Whether cutting ``seq_len`` tokens into equal parts, as flash decoding does, leaves a split without tokens."""
    if seq_len == 0:
        return num_splits > 1
    return -(-seq_len // _split_length(seq_len, num_splits)) < num_splits


@lru_cache(maxsize=4096)
def boundary_lengths(
    steps: tuple[int, ...], num_splits: int, most: int, limits: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Lengths up to ``most``, ascending from 0: tiny ones and those within one of the end of a step or split.

    And of each of ``limits``, at which something else begins.
    """
    lengths = {0, 1, 2, 3, 5, most, *_near(num_splits, *limits)}
    for step in steps:
        lengths.update(_near(*(step * k for k in _MULTIPLES), *([step * num_splits] if num_splits > 1 else [])))
        lengths.add(step + step // 2)
    return tuple(sorted(length for length in lengths if 0 <= length <= most))


@lru_cache(maxsize=4096)
def boundary_positions(seq_len: int, steps: tuple[int, ...], num_splits: int) -> tuple[int, ...]:
    """First and last token of the sequence and of its first and last page, tile and split; ascending."""
    widths = {*steps}
    if num_splits > 1 and seq_len:
        split = _split_length(seq_len, num_splits)
        widths.update({split, *(-(-split // step) * step for step in steps)})
    positions = {0, seq_len - 1}
    for width in widths:
        last_start = (seq_len - 1) // width * width
        positions.update({width - 1, width, last_start - 1, last_start})
    return tuple(sorted(position for position in positions if 0 <= position < seq_len))


def query_steps(tiles: tuple[int, ...], gqa_ratio: int) -> tuple[int, ...]:
    """By how many query tokens a kernel may advance: tiles that hold one query head, or all heads of a group."""
    sizes = (QUERY_TILE, *(tile for tile in tiles if tile > QUERY_TILE))
    return tuple(sorted({step for size in sizes for step in (size, size // gqa_ratio) if step > 1}))


@lru_cache(maxsize=4096)
def causal_positions(seq_len: int, query_len: int, steps: tuple[int, ...]) -> tuple[int, ...]:
    """The last key of the first query token, and of the first token of each tile of queries, with their neighbours.

    ``steps``: see ``query_steps``. A key just past a query's limit is live, and must get no weight all the same.
    """
    if not query_len:
        return ()
    first = seq_len - query_len
    positions = _near(*(first + k * step for step in (0, *steps) for k in (1, 2)))
    return tuple(sorted({position for position in (first - 1, first, *positions) if 0 <= position < seq_len}))


def _split_length(seq_len: int, num_splits: int) -> int:
    return -(-seq_len // num_splits)


def _near(*values: int) -> Iterator[int]:
    return (value + offset for value in values for offset in _NEAR)


def _counts(options: Mapping[str, OptionValue]) -> Iterator[tuple[str, int]]:
    """Options that are positive integers, by lower-case name."""
    for name, value in options.items():
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            yield name.lower(), value
