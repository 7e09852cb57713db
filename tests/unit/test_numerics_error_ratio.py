"""Error over bound, one number per element, in every combination of finite, infinite and NaN."""

from __future__ import annotations

import math

import pytest
import torch

from attnfuzz.numerics import error_ratio

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("got", "expected", "bound", "ratio"),
    [
        (1.5, 1.0, 0.25, 2.0),
        (0.5, 1.0, 1.0, 0.5),
        (1.0, 1.0, 0.0, 0.0),
        (0.0, -0.0, 0.0, 0.0),
        (1.5, 1.0, 0.0, INF),
        (-INF, -INF, 0.0, 0.0),
        (-INF, -INF, INF, 0.0),
        (INF, INF, 1.0, 0.0),
        (INF, -INF, 1.0, INF),
        (-INF, 1.0, 1.0, INF),
        (-INF, 1.0, INF, INF),
        (1.0, -INF, 1.0, INF),
        (1.0, -INF, INF, INF),
        (NAN, 1.0, 1.0, INF),
        (NAN, 1.0, INF, INF),
        (NAN, -INF, INF, INF),
        (2.0, 1.0, INF, 0.0),
        (2.0, 1.0, NAN, INF),
        (NAN, NAN, INF, 0.0),
        (1.0, NAN, INF, 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_ratio_of_one_element(got: float, expected: float, bound: float, ratio: float, dtype: torch.dtype) -> None:
    """A NaN or a wrong infinity must never pass, and an exact result never fail."""
    tensors = torch.tensor([got], dtype=dtype), *torch.tensor([[expected], [bound]], dtype=torch.float64)
    assert error_ratio(*tensors).tolist() == [ratio]


def test_shape_is_kept() -> None:
    """The verdict names the worst element by its index, so the ratio must have the result's shape."""
    ones = torch.ones(2, 3, 4, dtype=torch.float64)
    assert error_ratio(ones.half(), ones, ones).shape == (2, 3, 4)
