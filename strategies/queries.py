"""How many query tokens each sequence has: prefill, decode, pieces of a prompt, none, and mixtures of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from attnfuzz.problems.boundaries import boundary_lengths
from attnfuzz.strategies.decisions import Decisions

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
    work = limits.work - sum(_work_of(1, seq_len, limits) for seq_len in seq_lens)
    drawn: list[int] = []
    for seq_len in seq_lens:
        room = max(1, (work + _work_of(1, seq_len, limits)) * limits.tile // max(limits.tile, seq_len))
        most = min(seq_len, limits.most, room)
        query_len = decisions.pick(_choices(kind, seq_len, most, limits))
        work -= _work_of(query_len, seq_len, limits) - _work_of(1, seq_len, limits)
        drawn.append(query_len)
    if not any(drawn):
        first = next(seq for seq, seq_len in enumerate(seq_lens) if seq_len)
        drawn[first] = 1
    return tuple(drawn)


def decide_slack(decisions: Decisions, longest: int, most: int | None) -> int:
    """How far a bound that a kernel is told lies above the longest, no higher than the ``most`` that it declares."""
    return decisions.pick([slack for slack in _SLACKS if most is None or longest + slack <= most])


def _work_of(query_len: int, seq_len: int, limits: QueryLimits) -> int:
    return query_len * max(1, -(-seq_len // limits.tile))


@lru_cache(maxsize=1 << 14)
def _choices(kind: str, seq_len: int, most: int, limits: QueryLimits) -> tuple[int, ...]:
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
