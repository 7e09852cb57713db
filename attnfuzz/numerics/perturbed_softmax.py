"""How far softmax weights and their log-sum-exp can move when each score moves by a known amount.

For condition numbers and rounding errors of these two functions see Blanchard, Higham, Higham, Accurately computing
the log-sum-exp and softmax functions, IMA J. Numer. Anal. 41 (2021).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

__all__ = ["PerturbedSoftmax", "logsumexp_shift", "perturbed_softmax"]

# exp(700) is finite in float64; a weight this large is never the smallest of the bounds it enters.
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class PerturbedSoftmax:
    """Softmax weights `p` of scores s, and limits on p' = softmax(s + e) over all |e_i| <= d_i.

    - `upper`: the largest p'_i, never above 1.
    - `interval`: the largest |p'_i - p_i|.
    - `first_order`: weights c_i with |sum_i (p'_i - p_i) x_i| <= sum_i c_i |x_i - x*|, x* = sum_i p_i x_i.
    """

    p: Float64[Tensor, "rows num_tokens"]
    upper: Float64[Tensor, "rows num_tokens"]
    interval: Float64[Tensor, "rows num_tokens"]
    first_order: Float64[Tensor, "rows num_tokens"]


def perturbed_softmax(
    scores: Float64[Tensor, "rows num_tokens"], score_error: Float64[Tensor, "rows num_tokens"]
) -> PerturbedSoftmax:
    """Limits on softmax(scores + e), |e_i| <= score_error_i; a score of -inf has weight 0 exactly.

    Upper end: p'_i grows with e_i and falls with every other e_j, so with L = log sum_j exp(s_j - d_j)

        p'_i <= exp(s_i + d_i) / (exp(s_i + d_i) - exp(s_i - d_i) + exp(L))
              = 1 / (1 - exp(-2 d_i) + exp(L - s_i - d_i))

    which cannot exceed 1 however large d_i is. The lower end likewise, with U = log sum_j exp(s_j + d_j):

        p'_i >= exp(s_i - d_i) / (exp(s_i - d_i) - exp(s_i + d_i) + exp(U))
              = 1 / (1 + exp(2 d_i) expm1(U - s_i - d_i))

    First order: p'_i = p_i (1 + t_i) / sum_j p_j (1 + t_j) with |t_i| <= expm1(d_i), so

        sum_i p'_i x_i - x* = sum_i p_i t_i (x_i - x*) / sum_j p_j (1 + t_j)
        c_i = p_i expm1(d_i) / sum_j p_j exp(-d_j)

    A token that takes all the weight has x_i = x*: its score error, however large, moves nothing.
    All of it is computed in the log domain: d_i of 1e4 next to p_i = 0 gives 0 and not 0 * inf.
    """
    log_total = scores.logsumexp(-1, keepdim=True)
    log_p = scores - log_total
    log_lowest_total = (log_p - score_error).logsumexp(-1, keepdim=True)
    p = log_p.exp()
    upper = 1 / (-torch.expm1(-2 * score_error) + torch.exp(log_lowest_total - log_p - score_error))
    log_first_order = log_p - log_lowest_total + _log_expm1(score_error)
    return PerturbedSoftmax(
        p=p,
        upper=upper,
        interval=torch.maximum(upper - p, p - _lower_end(log_p, score_error)),
        first_order=log_first_order.clamp(max=_LARGEST_EXPONENT).exp(),
    )


def logsumexp_shift(
    scores: Float64[Tensor, "rows num_tokens"], score_error: Float64[Tensor, "rows num_tokens"]
) -> Float64[Tensor, " rows"]:
    """The largest |log sum exp(scores + e) - log sum exp(scores)| over all |e_i| <= score_error_i.

    Log-sum-exp grows with every score, so the extremes are at e = +d and e = -d. To first order this is sum_i p_i d_i:
    each score's error counts as much as its token weighs. Each row needs one finite score.
    """
    log_p = scores - scores.logsumexp(-1, keepdim=True)
    return torch.maximum((log_p + score_error).logsumexp(-1), -(log_p - score_error).logsumexp(-1))


def _lower_end(
    log_p: Float64[Tensor, "rows num_tokens"], score_error: Float64[Tensor, "rows num_tokens"]
) -> Float64[Tensor, "rows num_tokens"]:
    log_highest_total = (log_p + score_error).logsumexp(-1, keepdim=True)
    # Not below its own float64 rounding error: exp(2 d_i) can make that matter, and only this way does the end fall.
    rounding = 4 * torch.finfo(torch.float64).eps * (1 + score_error)
    others = torch.maximum(log_highest_total - log_p - score_error, rounding)
    return 1 / (1 + (2 * score_error).clamp(max=_LARGEST_EXPONENT).exp() * torch.expm1(others))


def _log_expm1(x: Float64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    return x + torch.log(-torch.expm1(-x))
