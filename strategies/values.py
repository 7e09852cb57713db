"""What q, K and V hold: score shapes, magnitudes, and needles at the boundaries."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from attnfuzz.problems.boundaries import DEFAULT_TILES, boundary_positions
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.recipes import KeyRecipe, Needle, ValueRecipe, Values
from attnfuzz.problems.supports import MAX_HEAD_SIZE
from attnfuzz.strategies.drawing import check_int, check_sizes, pick

__all__ = ["draw_scale", "draw_values", "needles", "scales", "values"]

_KEYS: tuple[KeyRecipe, ...] = get_args(KeyRecipe)
_VALUES: tuple[ValueRecipe, ...] = get_args(ValueRecipe)
_EXPONENTS = (0, 0, 0, 0, 1, -2, 2, 4, -6, 8)
_SEEDS = range(64)
_NEEDLE_COUNTS = (0, 0, 1, 1, 2, 3)
_FACTORS = (1.0, 0.125, 0.5, 2.0, 0.0625)


def draw_scale(draw: st.DrawFn, head_size: int) -> float:
    """``1/sqrt(head_size)`` half of the time."""
    usual = default_scale(head_size)
    return pick(draw, (usual, usual, usual, usual, usual, *_FACTORS))


def draw_values(
    draw: st.DrawFn,
    seq_lens: tuple[int, ...],
    *,
    num_kv_heads: int,
    steps: tuple[int, ...],
    num_splits: int,
    max_needles: int = 3,
) -> Values:
    drawn = draw_needles(draw, seq_lens, num_kv_heads, steps, num_splits, max_needles)
    return Values(
        keys=pick(draw, _KEYS),
        values=pick(draw, _VALUES),
        logit_exponent=pick(draw, _EXPONENTS),
        seed=pick(draw, _SEEDS),
        needles=drawn,
    )


def draw_needles(
    draw: st.DrawFn,
    seq_lens: tuple[int, ...],
    num_kv_heads: int,
    steps: tuple[int, ...],
    num_splits: int,
    max_needles: int,
) -> tuple[Needle, ...]:
    rows = [seq for seq, seq_len in enumerate(seq_lens) if seq_len]
    count = pick(draw, [count for count in _NEEDLE_COUNTS if count <= max_needles]) if rows else 0
    drawn = set()
    for _ in range(count):
        seq = pick(draw, rows)
        position = pick(draw, boundary_positions(seq_lens[seq], steps or DEFAULT_TILES, num_splits))
        drawn.add(Needle(seq=seq, position=position, kv_head=pick(draw, range(num_kv_heads))))
    return tuple(sorted(drawn))


@st.composite
def _needles(
    draw: st.DrawFn,
    seq_lens: tuple[int, ...],
    num_kv_heads: int,
    steps: tuple[int, ...],
    num_splits: int,
    max_needles: int,
) -> tuple[Needle, ...]:
    return draw_needles(draw, seq_lens, num_kv_heads, steps, num_splits, max_needles)


@st.composite
def _values(
    draw: st.DrawFn,
    seq_lens: tuple[int, ...],
    num_kv_heads: int,
    steps: tuple[int, ...],
    num_splits: int,
    max_needles: int,
) -> Values:
    return draw_values(
        draw, seq_lens, num_kv_heads=num_kv_heads, steps=steps, num_splits=num_splits, max_needles=max_needles
    )


def needles(
    *,
    seq_lens: tuple[int, ...],
    num_kv_heads: int = 1,
    steps: tuple[int, ...] = DEFAULT_TILES,
    num_splits: int = 1,
    max_needles: int = 3,
) -> st.SearchStrategy[tuple[Needle, ...]]:
    """Up to ``max_needles`` keys on the first or last token of a sequence, page, tile or split.

    ``steps``: page and tile sizes. Shrinks to no needle. Raises ValueError.
    """
    _check_values(seq_lens, num_kv_heads, steps, num_splits, max_needles)
    return _needles(seq_lens, num_kv_heads, steps, num_splits, max_needles)


def values(
    *,
    seq_lens: tuple[int, ...],
    num_kv_heads: int = 1,
    steps: tuple[int, ...] = DEFAULT_TILES,
    num_splits: int = 1,
    max_needles: int = 3,
) -> st.SearchStrategy[Values]:
    """Every recipe of keys and values, at logit scales from 2^-6 to 2^8, with ``needles``. Shrinks to ``Values()``.

    Raises ValueError.
    """
    _check_values(seq_lens, num_kv_heads, steps, num_splits, max_needles)
    return _values(seq_lens, num_kv_heads, steps, num_splits, max_needles)


@st.composite
def _scales(draw: st.DrawFn, head_size: int) -> float:
    return draw_scale(draw, head_size)


def scales(*, head_size: int) -> st.SearchStrategy[float]:
    """Softmax scales: ``1/sqrt(head_size)`` rounded to float32, and some dyadic ones. Shrinks to the former.

    Raises ValueError.
    """
    check_int("head_size", head_size, low=1, high=MAX_HEAD_SIZE)
    return _scales(head_size)


def _check_values(
    seq_lens: tuple[int, ...], num_kv_heads: int, steps: tuple[int, ...], num_splits: int, max_needles: int
) -> None:
    if not isinstance(seq_lens, tuple) or not seq_lens:
        raise ValueError(f"seq_lens={seq_lens!r} must be a non-empty tuple of integers; one for each sequence")
    for i, seq_len in enumerate(seq_lens):
        check_int(f"seq_lens[{i}]", seq_len, low=0, high=1 << 24)
    check_int("num_kv_heads", num_kv_heads, low=1, high=1024)
    check_sizes("steps", steps, high=1 << 24, may_be_empty=True)
    check_int("num_splits", num_splits, low=1, high=4096)
    check_int("max_needles", max_needles, low=0, high=3)
