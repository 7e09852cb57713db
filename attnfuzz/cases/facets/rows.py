"""Axes of one sequence of a batch: where it ends, and where its needles lie.

They are apart from the axes of a whole case because they belong together: that *some* sequence ends on a page boundary
while *another* one leaves a split empty says nothing about one that does both. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from attnfuzz.cases.facets.facet import Axis, Domain, Levels
from attnfuzz.problems.attention import AttentionCase
from attnfuzz.problems.boundaries import has_empty_split, num_splits_of, split_count, tile_sizes
from attnfuzz.problems.module import case_type_of, has_query_lens

LENGTHS = {"0": 0, "1": 1, "2 to 15": 15, "16 to 127": 127, "128 to 1023": 1023, "1024 on": 1 << 62}
QUERY_LENGTHS = {"0": 0, "1": 1, "2 to 15": 15, "16": 16, "17 on": 1 << 62}
_FILLINGS = ("full", "1 token", "1 short", "between")


class Row(NamedTuple):
    """A sequence: its length, what it is cut into (0: no pages), where its needles are, and its query tokens."""

    length: int
    page: int
    tiles: tuple[int, ...]
    num_splits: int
    needles: tuple[int, ...] = ()
    query_len: int = 1


def rows_of(case: AttentionCase) -> set[Row]:
    """The distinct sequences of ``case``."""
    cut = (case.page_size, tile_sizes(case.options), num_splits_of(case))
    query_lens = case.query_counts
    rows = {Row(length, *cut, (), query_len) for length, query_len in set(zip(case.seq_lens, query_lens, strict=True))}
    needles: dict[int, list[int]] = {}
    for needle in case.values.needles:
        needles.setdefault(needle.seq, []).append(needle.position)
    return rows | {
        Row(case.seq_lens[seq], *cut, tuple(positions), query_lens[seq]) for seq, positions in needles.items()
    }


def row_axes(domain: Domain) -> Iterator[Axis]:
    """The axes of rows that make sense for a kernel with its options."""
    choices = [{name: choice} for name, choices in domain.options.items() for choice in choices]
    tiled = any(map(tile_sizes, choices))
    fields = case_type_of(domain.problem).__struct_fields__
    split = "num_splits" in fields or any(split_count(choice) > 1 for choice in choices)
    wanted = {"last page": "block_size" in fields, "last tile": tiled, "split filling": split}
    wanted |= dict.fromkeys(("query length", "phase", "causal needle"), has_query_lens(domain.problem))
    return (axis for axis in _AXES if wanted.get(axis.name, True))


def query_phase(query_len: int, seq_len: int) -> str:
    """The kind of a sequence's query tokens: all of it, the last one, a piece of a prompt, or none this step."""
    if not query_len:
        return "no query"
    if query_len == seq_len:
        return "prefill"
    return "decode" if query_len == 1 else "chunk"


def _length(row: Row) -> Levels:
    return (next(name for name, most in LENGTHS.items() if row.length <= most),)


def _filling(length: int, step: int) -> Levels:
    """How full the last of equal parts of ``step`` tokens is; nothing for an empty sequence."""
    if length == 0 or step == 0:
        return ()
    rest = length % step
    if rest == 0:
        return ("full",)
    return tuple(name for name, at in (("1 token", 1), ("1 short", step - 1)) if rest == at) or ("between",)


def _last_page(row: Row) -> Levels:
    return _filling(row.length, row.page)


def _last_tile(row: Row) -> Levels:
    return tuple({level for tile in row.tiles for level in _filling(row.length, tile)})


def _split_filling(row: Row) -> Levels:
    if row.num_splits == 1:
        return ("one split",)
    if has_empty_split(row.length, row.num_splits):
        return ("empty split",)
    return ("uneven" if row.length % row.num_splits else "even",)


def _needles(row: Row) -> Levels:
    """A needle in the middle of everything, where no kernel changes what it does, is on no level."""
    return tuple({level for position in row.needles for level in _needle(row, position)}) if row.needles else ("none",)


def _needle(row: Row, position: int) -> Levels:
    split = -(-row.length // row.num_splits) if row.num_splits > 1 else 0
    edges = {
        "first token": position == 0,
        "last token": position == row.length - 1,
        "page edge": _is_edge(position, row.page),
        "tile edge": any(_is_edge(position, tile) for tile in row.tiles),
        "split edge": _is_edge(position, split),
    }
    return tuple(name for name, is_there in edges.items() if is_there)


def _query_length(row: Row) -> Levels:
    return (next(name for name, most in QUERY_LENGTHS.items() if row.query_len <= most),)


def _phase(row: Row) -> Levels:
    return (query_phase(row.query_len, row.length),)


def _causal_needles(row: Row) -> Levels:
    """Needles beside the limit of the first query token: the last key that it sees, and the first that it must not."""
    first = row.length - row.query_len
    levels = {"at the limit": first in row.needles, "past it": row.query_len > 1 and first + 1 in row.needles}
    return tuple(name for name, is_there in levels.items() if is_there and row.query_len) or ("none",)


def _is_edge(position: int, step: int) -> bool:
    return step > 0 and position % step in (0, step - 1)


_AXES = (
    Axis("length", tuple(LENGTHS), _length),
    Axis("last page", _FILLINGS, _last_page),
    Axis("last tile", _FILLINGS, _last_tile),
    Axis("split filling", ("one split", "even", "uneven", "empty split"), _split_filling),
    Axis("query length", tuple(QUERY_LENGTHS), _query_length),
    Axis("phase", ("no query", "decode", "chunk", "prefill"), _phase),
    Axis("causal needle", ("none", "at the limit", "past it"), _causal_needles),
    Axis("needle", ("none", "first token", "last token", "page edge", "tile edge", "split edge"), _needles),
)
