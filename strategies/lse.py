"""Log-sum-exps of the two states that are merged: finite, far apart, equal and infinite ones on either side."""

from __future__ import annotations

from hypothesis import strategies as st

from attnfuzz.problems.cases import LsePair
from attnfuzz.problems.choices import lse_kinds_of
from attnfuzz.problems.recipes import LseKind
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies.arguments import check_bounds
from attnfuzz.strategies.decisions import Decisions, decided

__all__ = ["LSE_PAIRS_BYTES", "decide_lse_pairs", "lse_pairs"]

_PAIR_COUNTS = (1, 2, 3, 4, 6, 8)
LSE_PAIRS_BYTES = 1 + 2 * 8


def decide_lse_pairs(
    decisions: Decisions, kinds: tuple[LseKind, ...], *, min_pairs: int, max_pairs: int
) -> tuple[LsePair, ...]:
    counts = [count for count in _PAIR_COUNTS if min_pairs <= count <= max_pairs] or [min_pairs]
    return tuple((decisions.pick(kinds), decisions.pick(kinds)) for _ in range(decisions.pick(counts)))


def lse_pairs(
    *, min_pairs: int = 1, max_pairs: int = 8, empty_states: bool = True
) -> st.SearchStrategy[tuple[LsePair, ...]]:
    """Kinds of (prefix, suffix) LSE, every combination of them. ``empty_states=False`` leaves out the infinite ones.

    Shrinks to one pair of finite LSEs. Raises ValueError.
    """
    check_bounds("pairs", min_pairs, max_pairs, low=1, high=64)
    kinds = lse_kinds_of(Supports(empty_sequences=empty_states))
    return decided(
        lambda decisions: decide_lse_pairs(decisions, kinds, min_pairs=min_pairs, max_pairs=max_pairs),
        size=LSE_PAIRS_BYTES,
    )
