"""How long sequences are, and how many query tokens each has: around every boundary at which a kernel changes."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from attnfuzz.problems.boundaries import DEFAULT_TILES, boundary_lengths
from attnfuzz.strategies.decisions import Decisions

_SEQ_COUNTS = (1, 1, 2, 2, 3, 4, 6, 8, 17, 33, 64)
_MOST_TOKENS = 1 << 24
_BUFFERS = (512, 1024, 2048, 4096, 8192)
"""Numbers of tokens for which buffers are made, and models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLimits:
    """``steps``: page and tile sizes whose boundaries are aimed at.

    ``work`` counts tiles of ``tile`` tokens over all sequences, at least one for each. Splits are counted only in part,
    since most of them are short: one tile for every 4 splits, and one for every 2 that are not empty.
    ``max_padded``: number of sequences times the longest. ``window``: keys that a query sees, if not all. ``known``: of
    a kernel, lengths at which it does something else.
    """

    steps: tuple[int, ...]
    num_splits: int
    min_seqs: int
    max_seqs: int
    min_len: int
    max_len: int
    max_padded: int
    work: int
    tile: int
    window: int | None = None
    known: tuple[int, ...] = ()


def decide_seq_lens(decisions: Decisions, limits: LengthLimits) -> tuple[int, ...]:
    """Sequences are drawn one after another; none takes more than the work that is left.

    So those that are drawn first tend to be the longest: in half of all batches they come last. With splits, the first
    is of more than a tile in half of them, if there is work for that.
    """
    least_work = _least_work(limits)
    work = limits.work
    drawn: list[int] = []
    count, is_reversed, is_long = decisions.pick(_batches(limits))
    longest = max(1, limits.max_padded // count)
    for waiting in range(count - 1, -1, -1):
        room = max(1, work - waiting * least_work - limits.num_splits // 4)
        most = min(longest, _longest_for(room, limits))
        seq_len = _pick_length(decisions, limits, most, is_long=is_long and not drawn)
        work -= _work_of(seq_len, limits)
        drawn.append(seq_len)
    return tuple(drawn[::-1] if is_reversed else drawn)


def _least_work(limits: LengthLimits) -> int:
    """Least work of one sequence."""
    return _work_of(limits.min_len, limits)


def _work_of(seq_len: int, limits: LengthLimits) -> int:
    tiles = -(-seq_len // limits.tile)
    return max(1, tiles, min(limits.num_splits, seq_len) // 2) + limits.num_splits // 4


def _longest_for(tiles: int, limits: LengthLimits) -> int:
    """The most tokens that take ``tiles`` without counting splits that are empty."""
    return tiles * limits.tile if tiles >= limits.num_splits // 2 else 2 * tiles + 1


def _batches(limits: LengthLimits) -> tuple[tuple[int, bool, bool], ...]:
    """Numbers of sequences for which the work is enough, each with ``is_reversed`` and ``is_long``."""
    most = max(limits.min_seqs, min(limits.max_seqs, limits.work // _least_work(limits)))
    return _batches_between(limits.min_seqs, most)


@lru_cache(maxsize=1024)
def _batches_between(least: int, most: int) -> tuple[tuple[int, bool, bool], ...]:
    counts = sorted([least, *(count for count in _SEQ_COUNTS if least <= count <= most), most])
    return tuple(product(counts, (False, True), (False, True)))


@lru_cache(maxsize=4096)
def _lengths(
    steps: tuple[int, ...], num_splits: int, min_len: int, max_len: int, known: tuple[int, ...]
) -> tuple[int, ...]:
    """Boundary lengths, ascending; tiles that a kernel may use without saying so count too."""
    every_step = tuple(dict.fromkeys((*steps, *DEFAULT_TILES)))
    lengths = boundary_lengths(every_step, num_splits, max_len, (*known, *_BUFFERS))
    return tuple(sorted({min_len, *(length for length in lengths if length >= min_len)}))


@lru_cache(maxsize=4096)
def _choices(
    steps: tuple[int, ...], num_splits: int, min_len: int, max_len: int, known: tuple[int, ...], window: int | None
) -> tuple[int, ...]:
    """1 first, because it is simplest; then 0, so often that one ragged batch in four has an empty row.

    With a window, two of three others are beyond it.
    """
    lengths = _lengths(steps, num_splits, min_len, max_len, known)
    empty_rows = [0] * max(1, len(lengths) // 8) if 0 in lengths else []
    others = [length for length in lengths if length > 1]
    if window is not None and (beyond := _beyond(window, steps, max_len)):
        others = sorted([*others, *beyond * max(1, 2 * len(others) // len(beyond))])
    return (*(length for length in lengths if length == 1), *empty_rows, *others)


def _beyond(window: int, steps: tuple[int, ...], max_len: int) -> list[int]:
    """Lengths for which the window begins with the second key, the last one of a step or the first one of the next."""
    begins = {1, *(step + offset for step in steps if step != window for offset in (-1, 0))}
    return sorted(window + begin for begin in begins if begin > 0 and window + begin <= max_len)


def _pick_length(decisions: Decisions, limits: LengthLimits, most: int, *, is_long: bool) -> int:
    """A length that is too long stands for one of those within ``most``, so that no length is preferred.

    With splits, for one of more than a tile: many kernels hand out whole tiles, and of one tile make one split. Then
    ``is_long`` asks for nothing else, unless a window says which lengths matter.
    """
    key = (limits.steps, limits.num_splits, limits.min_len, limits.max_len, limits.known)
    if is_long and limits.num_splits > 1 and limits.window is None:
        lengths = _lengths(*key)
        several = lengths[bisect_right(lengths, limits.tile) : bisect_right(lengths, most)]
        if several:
            return decisions.pick(several)
    length = decisions.pick(_choices(*key, limits.window))
    if length <= most:
        return length
    lengths = _lengths(*key)
    end = max(1, bisect_right(lengths, most))
    first = bisect_right(lengths, limits.tile) if limits.num_splits > 1 else 0
    first = first if first < end else 0
    return lengths[first + bisect_right(lengths, length) % (end - first)]


_KINDS = ("decode", "mixed", "mixed", "mixed", "mixed", "prefill", "chunks", "chunks")
_SLACKS = (0, 0, 0, 1, 7, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLimits:
    """``steps``: see ``query_steps``. ``work`` counts, for each query token, tiles of ``tile`` keys.

    ``least``: 1 where a sequence without query tokens is not supported; else 0. ``most``: query tokens of a sequence.
    """

    steps: tuple[int, ...]
    least: int
    most: int
    work: int
    tile: int


def decide_query_lens(decisions: Decisions, seq_lens: tuple[int, ...], limits: QueryLimits) -> tuple[int, ...]:
    """One for each of ``seq_lens``, of which at least one is not 0; at least one query token in all.

    Sequences are taken one after another, and none takes more than the work that is left beyond a token for each other.
    """
    kind = decisions.pick(_KINDS)
    work = limits.work - sum(_work_of_queries(1, seq_len, limits) for seq_len in seq_lens)
    drawn: list[int] = []
    for seq_len in seq_lens:
        room = max(1, (work + _work_of_queries(1, seq_len, limits)) * limits.tile // max(limits.tile, seq_len))
        most = min(seq_len, limits.most, room)
        query_len = decisions.pick(_query_choices(kind, seq_len, most, limits))
        work -= _work_of_queries(query_len, seq_len, limits) - _work_of_queries(1, seq_len, limits)
        drawn.append(query_len)
    if not any(drawn):
        first = next(seq for seq, seq_len in enumerate(seq_lens) if seq_len)
        drawn[first] = 1
    return tuple(drawn)


def decide_slack(decisions: Decisions, longest: int, most: int | None) -> int:
    """How far a bound that a kernel is told lies above the longest, no higher than the ``most`` that it declares."""
    return decisions.pick([slack for slack in _SLACKS if most is None or longest + slack <= most])


def _work_of_queries(query_len: int, seq_len: int, limits: QueryLimits) -> int:
    return query_len * max(1, -(-seq_len // limits.tile))


@lru_cache(maxsize=1 << 14)
def _query_choices(kind: str, seq_len: int, most: int, limits: QueryLimits) -> tuple[int, ...]:
    """1 first, because it is simplest."""
    if most <= 1:
        return (min(1, most), limits.least) if kind == "mixed" and most else (min(1, most),)
    if kind == "decode":
        return (1, 1, 1, limits.least)  # a batch of the size of a captured graph has places without a query
    if kind == "prefill":
        return (most,)  # the whole sequence, if there is work for that
    lengths = [length for length in boundary_lengths((*limits.steps, seq_len), 1, most) if length > 1]
    at_tiles = [length for length in lengths if any(abs(length - step) <= 1 for step in limits.steps)]
    chunks = (1, *sorted([*lengths, *at_tiles]), most)
    if kind == "chunks":
        return chunks
    ends = [limits.least] * max(1, len(chunks) // 6) + [1] * (len(chunks) // 3) + [most] * (len(chunks) // 4)
    return (*chunks[:1], *ends, *chunks[1:])
