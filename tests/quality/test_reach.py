"""Bugs that only draws which reach for them meet are met, and right kernels of the same shape are silent."""

from __future__ import annotations

import pytest

from tests.quality.reach import explore, names

pytestmark = pytest.mark.night

_BUDGET_S = 120
"""On a machine that does nothing else a third of it is enough."""


@pytest.mark.parametrize("name", names())
def test_what_is_rare_is_met_and_right_kernels_are_silent(name: str) -> None:
    """Draws would no longer reach what they were made to reach, or accuse who is right there."""
    _, _, told = explore(name, budget_s=_BUDGET_S, seed=1)
    assert bool(told) is not name.startswith("right_")
