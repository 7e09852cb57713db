"""tests/shape_checks.py: how much of a test is checked."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from attnfuzz.numerics import error_ratio
from tests.shape_checks import check_shapes

CHECKED_BY_DAY, LEFT_TO_THE_NIGHT = "test_10", "test_11"


def takes_wrong_shapes() -> bool:
    two, one = torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    try:
        error_ratio(two, one, two)
    except TypeCheckError:
        return False
    except RuntimeError:  # of torch
        return True
    return True


def call_often() -> None:
    two = torch.zeros(2, dtype=torch.float64)
    for _ in range(3_000):
        error_ratio(two, two, two)


@pytest.mark.parametrize(("test", "at_first"), [(CHECKED_BY_DAY, False), (LEFT_TO_THE_NIGHT, True)])
def test_by_day_some_tests_are_checked_and_only_in_their_first_calls(test: str, at_first: bool) -> None:
    """The longest tests would take three times as long, for shapes that were checked before."""
    check_shapes(test, by_day=True)
    assert takes_wrong_shapes() is at_first
    call_often()
    assert takes_wrong_shapes()


@pytest.mark.parametrize("test", [CHECKED_BY_DAY, LEFT_TO_THE_NIGHT])
def test_at_night_every_call_is_checked(test: str) -> None:
    """A wrong shape late in a test would not be seen by anyone."""
    check_shapes(test, by_day=False)
    call_often()
    assert not takes_wrong_shapes()
