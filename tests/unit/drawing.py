"""What a strategy gives, one draw after the other, the same in each run."""

from __future__ import annotations

from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st


def drawn_from(strategy: st.SearchStrategy[Any], draws: int = 400) -> list[Any]:
    found: list[Any] = []

    @settings(max_examples=draws, phases=[Phase.generate], database=None, derandomize=True, deadline=None)
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found
