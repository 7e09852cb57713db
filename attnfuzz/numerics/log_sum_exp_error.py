"""Error of lse = max s + log sum_i exp(s_i - max s), in natural logarithms, stored as float32."""

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.numerics.row_units import RowUnits

__all__ = ["log_sum_exp_error"]


def log_sum_exp_error(
    lse: Float64[Tensor, "rows group 1"],
    shift: Float64[Tensor, "rows group 1"],
    sum_error: Float64[Tensor, "rows group 1"],
    units: RowUnits,
) -> Float64[Tensor, "rows group 1"]:
    """Largest error of a computed LSE, by source.

    - Scores (`shift`): each counts as much as its token weighs (`logsumexp_shift`). Unlike `out`, LSE is not invariant
      under a shift of all scores, so their errors include roundings of the scale and of the maximum.
    - The sum l: a relative error f = `sum_error` moves log l by at most -log(1 - f).
    - log l: `LOG_ERROR (1 + log l)`, and 1 <= l <= n.
    - max s + log l: rounded once, and once more in base 2 for each of the products with log 2 and that constant: three
      units of |lse| <= |max s| + log n, or of max s and log l each, where |max s| <= |lse| + log n.

    The last two come once for each stage: a split kernel takes a second logarithm. Storing lse in base 2 changes
    nothing: its rounding is relative, so it converts to the same error in natural logarithms.
    """
    logarithm = torch.addcmul(units.logarithm, units.lse, lse.abs())
    return shift - torch.log1p(-sum_error) + logarithm
