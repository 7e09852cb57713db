"""Launch configuration drawn like any other input: split counts and a kernel's options."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from attnfuzz.problems.choices import NUM_SPLITS
from attnfuzz.problems.supports import OptionValue, check_options
from attnfuzz.strategies.arguments import check_bounds
from attnfuzz.strategies.decisions import Decisions, decided

__all__ = ["decide_options", "option_choices", "split_counts"]


def decide_options(decisions: Decisions, options: Mapping[str, tuple[OptionValue, ...]]) -> dict[str, OptionValue]:
    return {name: decisions.pick(choices) for name, choices in options.items()}


def option_choices(options: Mapping[str, tuple[OptionValue, ...]]) -> st.SearchStrategy[dict[str, OptionValue]]:
    """One choice for each of a kernel's ``options``. Shrinks to the first choices. Raises ValueError."""
    choices = dict(options)
    check_options(choices)
    return decided(lambda decisions: decide_options(decisions, choices), size=len(choices))


def split_counts(*, min_splits: int = 1, max_splits: int = 32) -> st.SearchStrategy[int]:
    """Numbers of splits of one sequence, most of which leave short sequences with empty splits.

    Shrinks to ``min_splits``. Raises ValueError.
    """
    check_bounds("splits", min_splits, max_splits, low=1, high=4096)
    counts = {min_splits, max_splits, *(count for count in NUM_SPLITS if min_splits <= count <= max_splits)}
    return st.sampled_from(sorted(counts))
