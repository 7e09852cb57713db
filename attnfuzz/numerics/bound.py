"""The result type of the error model, and the rounding that ends every kernel."""

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.numerics.row_units import RowUnits

__all__ = ["Bound", "after_rounding"]


@dataclass(frozen=True)
class Bound:
    """Largest error a correct kernel can make, for each element: `|got - expected| <= bound`.

    `out`: in units of the values; `lse`: in natural logarithms. An empty result must be exact: its bound is 0.
    """

    out: Float64[Tensor, "*rows v_head_size"]
    lse: Float64[Tensor, "*rows"]


def after_rounding(
    error: Float64[Tensor, "rows group v_head_size"],
    expected: Float64[Tensor, "rows group v_head_size"],
    units: RowUnits,
) -> Float64[Tensor, "rows group v_head_size"]:
    """Error of a result once it is stored.

    The stored number is o' (1 + t) + h with |t| <= u, |h| <= eta and |o' - o| <= error, so it is off by at most
    error (1 + u) + u |o| + eta = error + u (error + |o|) + eta.
    """
    return torch.addcmul(error + units.stored_absolute, units.stored, error + expected.abs())
