"""Error of lse = max s + log sum_i exp(s_i - max s), in natural logarithms, stored as float32."""

import math

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.numerics.perturbed_softmax import logsumexp_shift
from attnfuzz.numerics.units import FLOAT32_ROUNDOFF, LOG_ERROR

__all__ = ["log_sum_exp_error"]


def log_sum_exp_error(
    scores: Float64[Tensor, "rows num_tokens"],
    score_error: Float64[Tensor, "rows num_tokens"],
    sum_error: Float64[Tensor, " rows"],
    *,
    num_stages: int,
) -> Float64[Tensor, " rows"]:
    """Largest error of a computed LSE, by source.

    - Scores: each counts as much as its token weighs (`logsumexp_shift`). Unlike `out`, LSE is not invariant
      under a shift of all scores, so `score_error` includes roundings of the scale and of the maximum.
    - The sum l: a relative error f moves log l by at most -log(1 - f).
    - log l: `LOG_ERROR (1 + log l)`, and 1 <= l <= n.
    - max s + log l: rounded once, and once more in base 2 for each of the products with log 2 and that constant: three
      units of |lse| <= |max s| + log n, or of max s and log l each, where |max s| <= |lse| + log n.

    The last two come once for each stage: a split kernel takes a second logarithm. Storing lse in base 2 changes
    nothing: its rounding is relative, so it converts to the same error in natural logarithms.
    """
    lse = scores.logsumexp(-1).abs()
    log_num_tokens = math.log(scores.shape[-1])
    stage = LOG_ERROR * (1 + log_num_tokens) + FLOAT32_ROUNDOFF * (3 * lse + 4 * log_num_tokens)
    return logsumexp_shift(scores, score_error) - torch.log1p(-sum_error) + num_stages * stage
