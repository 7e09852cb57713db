"""The verdict in one number per element: error over bound. Above 1 is a bug."""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

__all__ = ["error_ratio"]


def error_ratio(
    got: Float[Tensor, "*shape"], expected: Float64[Tensor, "*shape"], bound: Float64[Tensor, "*shape"]
) -> Float64[Tensor, "*shape"]:
    """`|got - expected| / bound`, elementwise, never NaN.

    0 where both are equal (the same infinity included); infinite where `got` is NaN, where only one is infinite or
    their signs differ, where a bound of 0 is exceeded, and where the bound itself is NaN.
    """
    exact = got.to(torch.float64)
    ratio = (exact - expected).abs() / bound
    ratio = torch.where(torch.isnan(ratio), torch.inf, ratio)
    return torch.where(exact == expected, 0.0, ratio)
