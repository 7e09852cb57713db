"""Launch configuration drawn like any other input: split counts and a kernel's options."""

from __future__ import annotations

from collections.abc import Mapping

from attnfuzz.problems.supports import OptionValue
from attnfuzz.strategies.decisions import Decisions


def decide_options(decisions: Decisions, options: Mapping[str, tuple[OptionValue, ...]]) -> dict[str, OptionValue]:
    return {name: decisions.pick(choices) for name, choices in options.items()}
