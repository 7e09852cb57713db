"""Log-sum-exps of the two states that are merged: finite, far apart, equal and infinite ones on either side."""

from __future__ import annotations

from hypothesis import strategies as st

from attnfuzz.problems.choices import lse_kinds_of
from attnfuzz.problems.recipes import LseKind, LsePair
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies.arguments import check_bounds
from attnfuzz.strategies.decisions import Decisions, decided

__all__ = ["LSE_PAIRS_BYTES", "decide_lse_pairs", "lse_pairs"]

_MOST_PAIRS = 8
_PRESENT = (False, True)
_PAIR_BYTES = 3
LSE_PAIRS_BYTES = _MOST_PAIRS * _PAIR_BYTES


def decide_lse_pairs(
    decisions: Decisions, kinds: tuple[LseKind, ...], *, min_pairs: int, max_pairs: int
) -> tuple[LsePair, ...]:
    """Each pair is there or not by itself, so that the shrinker can remove any of them."""
    pairs: list[LsePair] = []
    for _ in range(_MOST_PAIRS):
        pair = decisions.part(_PAIR_BYTES)
        if pair.pick(_PRESENT):
            pairs.append((pair.pick(kinds), pair.pick(kinds)))
    return (*pairs[:max_pairs], *[(kinds[0], kinds[0])] * (min_pairs - len(pairs)))


def lse_pairs(
    *, min_pairs: int = 1, max_pairs: int = 8, empty_states: bool = True
) -> st.SearchStrategy[tuple[LsePair, ...]]:
    """Kinds of (prefix, suffix) LSE, every combination of them. ``empty_states=False`` leaves out the infinite ones.

    Shrinks to one pair of finite LSEs. Raises ValueError.
    """
    check_bounds("pairs", min_pairs, max_pairs, low=1, high=_MOST_PAIRS)
    kinds = lse_kinds_of(Supports(empty_sequences=empty_states))
    return decided(
        lambda decisions: decide_lse_pairs(decisions, kinds, min_pairs=min_pairs, max_pairs=max_pairs),
        size=LSE_PAIRS_BYTES,
    )
