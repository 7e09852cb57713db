"""Launch configuration drawn like any other input: split counts and a kernel's options."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from attnfuzz.problems.choices import NUM_SPLITS
from attnfuzz.problems.supports import OptionValue, check_options
from attnfuzz.strategies.drawing import check_bounds, pick

__all__ = ["draw_options", "option_choices", "split_counts"]


def draw_options(draw: st.DrawFn, options: Mapping[str, tuple[OptionValue, ...]]) -> dict[str, OptionValue]:
    return {name: pick(draw, choices) for name, choices in options.items()}


@st.composite
def _option_choices(draw: st.DrawFn, options: Mapping[str, tuple[OptionValue, ...]]) -> dict[str, OptionValue]:
    return draw_options(draw, options)


def option_choices(options: Mapping[str, tuple[OptionValue, ...]]) -> st.SearchStrategy[dict[str, OptionValue]]:
    """One choice for each of a kernel's ``options``. Shrinks to the first choices. Raises ValueError."""
    check_options(dict(options))
    return _option_choices(dict(options))


def split_counts(*, min_splits: int = 1, max_splits: int = 32) -> st.SearchStrategy[int]:
    """Numbers of splits of one sequence, most of which leave short sequences with empty splits.

    Shrinks to ``min_splits``. Raises ValueError.
    """
    check_bounds("splits", min_splits, max_splits, low=1, high=4096)
    counts = {min_splits, max_splits, *(count for count in NUM_SPLITS if min_splits <= count <= max_splits)}
    return st.sampled_from(sorted(counts))
