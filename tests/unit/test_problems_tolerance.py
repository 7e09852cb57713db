"""Fixed tolerances, for those who must match another suite."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from attnfuzz.problems.declared_numerics import FixedTolerance


def test_bound_is_absolute_plus_relative() -> None:
    """The formula is `torch.testing.assert_close`'s: atol + rtol |expected|, on numbers and tensors."""
    tolerance = FixedTolerance(atol=0.5, rtol=0.25)
    assert tolerance.bound(-2.0) == 1.0
    assert tolerance.bound(torch.tensor([0.0, -2.0, 4.0])).tolist() == [0.5, 1.0, 1.5]


@pytest.mark.parametrize("field", ["atol", "rtol"])
@pytest.mark.parametrize("wrong", [-1e-9, math.nan, math.inf, "1e-2", True, None])
def test_tolerances_that_are_not_finite_and_non_negative_are_refused(field: str, wrong: Any) -> None:
    """A NaN or infinite tolerance would accept everything, a negative one nothing."""
    arguments: dict[str, Any] = {"atol": 0.0, "rtol": 0.0} | {field: wrong}
    with pytest.raises(ValueError, match=rf"FixedTolerance: {field}=.* must be a finite number >= 0"):
        FixedTolerance(**arguments)


def test_a_tolerance_survives_json() -> None:
    """Declarations cross a pipe as JSON."""
    tolerance = FixedTolerance(atol=1, rtol=1e-2)
    assert msgspec.json.decode(msgspec.json.encode(tolerance), type=FixedTolerance) == tolerance
