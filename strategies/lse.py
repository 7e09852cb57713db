"""Log-sum-exps of the two states that are merged: finite, far apart, equal and infinite ones on either side."""

from __future__ import annotations

from attnfuzz.problems.recipes import LseKind, LsePair
from attnfuzz.strategies.decisions import Decisions

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
