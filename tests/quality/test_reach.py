"""Bugs that only draws which reach for them meet are met, and right kernels of the same shape are silent."""

from __future__ import annotations

import pytest

from tests.quality.reach import KINDS, Kind, Wanted, explore, wanted_on

_BUDGET_S = 120
"""On a machine that does nothing else a third of it is enough."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.name))
def test_each_kind_has_bugs_and_a_right_kernel(kind: Kind) -> None:
    """A pattern that fits nothing any more would pass for bugs that are found."""
    of_kind = [one for one in (*wanted_on("cpu"), *wanted_on("cuda")) if one.kind == kind.name]
    assert len({one.target for one in of_kind if not one.is_right}) >= 2
    assert any(one.is_right for one in of_kind)


@pytest.mark.night
@pytest.mark.parametrize("wanted", [*wanted_on("cpu")], ids=lambda one: str(one.target).rpartition(":")[2])
def test_what_is_rare_is_met_and_right_kernels_are_silent(wanted: Wanted) -> None:
    """Draws would no longer reach what they were made to reach, or accuse who is right there."""
    found = explore(wanted, budget_s=_BUDGET_S, seed=1)
    assert found.is_as_it_should_be, found.row
