"""Log-sum-exps of the two states that are merged: finite, far apart, equal and infinite ones on either side."""

from __future__ import annotations

from hypothesis import strategies as st

from attnfuzz.problems.cases import LsePair
from attnfuzz.problems.choices import lse_kinds_of
from attnfuzz.problems.recipes import LseKind
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies.drawing import check_bounds, pick

__all__ = ["draw_lse_pairs", "lse_pairs"]

_PAIR_COUNTS = (1, 2, 3, 4, 6, 8)


def draw_lse_pairs(
    draw: st.DrawFn, kinds: tuple[LseKind, ...], *, min_pairs: int, max_pairs: int
) -> tuple[LsePair, ...]:
    counts = [count for count in _PAIR_COUNTS if min_pairs <= count <= max_pairs] or [min_pairs]
    return tuple((pick(draw, kinds), pick(draw, kinds)) for _ in range(pick(draw, counts)))


@st.composite
def _lse_pairs(draw: st.DrawFn, kinds: tuple[LseKind, ...], least: int, most: int) -> tuple[LsePair, ...]:
    return draw_lse_pairs(draw, kinds, min_pairs=least, max_pairs=most)


def lse_pairs(
    *, min_pairs: int = 1, max_pairs: int = 8, empty_states: bool = True
) -> st.SearchStrategy[tuple[LsePair, ...]]:
    """Kinds of (prefix, suffix) LSE, every combination of them. ``empty_states=False`` leaves out the infinite ones.

    Shrinks to one pair of finite LSEs. Raises ValueError.
    """
    check_bounds("pairs", min_pairs, max_pairs, low=1, high=64)
    return _lse_pairs(lse_kinds_of(Supports(empty_sequences=empty_states)), min_pairs, max_pairs)
