"""How far softmax weights and their log-sum-exp can move when each score moves by a known amount.

For condition numbers and rounding errors of these two functions see Blanchard, Higham, Higham, Accurately computing
the log-sum-exp and softmax functions, IMA J. Numer. Anal. 41 (2021).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

__all__ = ["LogTotals", "PerturbedSoftmax", "log_totals", "logsumexp_shift", "perturbed_softmax"]

# exp(-700) is above 0 in float64; a weight divided by it is never the smallest of the bounds it enters.
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class LogTotals:
    """Of softmax weights p whose scores move by d_i: log sum_i p_i exp(-d_i), log sum_i p_i exp(d_i), log p_i + d_i."""

    lowest: Float64[Tensor, "*rows 1"]
    highest: Float64[Tensor, "*rows 1"]
    raised: Float64[Tensor, "*rows num_tokens"]

    def __getitem__(self, index: int) -> LogTotals:
        return LogTotals(self.lowest[index], self.highest[index], self.raised[index])


@dataclass(frozen=True)
class PerturbedSoftmax:
    """Softmax weights `p` of scores s, and limits on p' = softmax(s + e) over all |e_i| <= d_i.

    - `upper`: the largest p'_i, never above 1.
    - `interval`: the largest |p'_i - p_i|.
    - `first_order`: weights c_i with |sum_i (p'_i - p_i) x_i| <= sum_i c_i |x_i - x*|, x* = sum_i p_i x_i.
    """

    p: Float64[Tensor, "*rows num_tokens"]
    upper: Float64[Tensor, "*rows num_tokens"]
    interval: Float64[Tensor, "*rows num_tokens"]
    first_order: Float64[Tensor, "*rows num_tokens"]


def log_totals(
    log_p: Float64[Tensor, "*#rows num_tokens"], score_error: Float64[Tensor, "*rows num_tokens"]
) -> LogTotals:
    """Both totals at once, each without overflow. A weight of 0 has log_p = -inf; each row needs one above 0."""
    moved = torch.stack([log_p - score_error, log_p + score_error])
    largest = moved.amax(-1, keepdim=True)
    lowest, highest = ((moved - largest).exp().sum(-1, keepdim=True).log() + largest).unbind()
    return LogTotals(lowest, highest, moved[1])


def perturbed_softmax(
    p: Float64[Tensor, "*rows num_tokens"], score_error: Float64[Tensor, "*rows num_tokens"], totals: LogTotals
) -> PerturbedSoftmax:
    """Limits on softmax(scores + e), |e_i| <= d_i = score_error_i > 0; a score of -inf has weight 0 exactly.

    `p`: the weights; `totals`: those of their logarithms and `score_error`.

    Upper end: p'_i grows with e_i and falls with every other e_j, so with L = log sum_j exp(s_j - d_j)

        p'_i <= exp(s_i + d_i) / (exp(s_i + d_i) - exp(s_i - d_i) + exp(L))
              = 1 / (1 - exp(-2 d_i) + exp(L - s_i - d_i))

    which cannot exceed 1 however large d_i is. The lower end likewise, with U = log sum_j exp(s_j + d_j):

        p'_i >= exp(s_i - d_i) / (exp(s_i - d_i) - exp(s_i + d_i) + exp(U))
              = exp(-2 d_i) / (exp(-2 d_i) + expm1(U - s_i - d_i))

    First order: p'_i = p_i (1 + t_i) / sum_j p_j (1 + t_j) with |t_i| <= expm1(d_i), so

        sum_i p'_i x_i - x* = sum_i p_i t_i (x_i - x*) / sum_j p_j (1 + t_j)
        c_i = p_i expm1(d_i) / sum_j p_j exp(-d_j) = (1 - exp(-d_i)) / exp(L - s_i - d_i)

    A token that takes all the weight has x_i = x*: its score error, however large, moves nothing.
    All of it is computed in the log domain: d_i of 1e4 next to p_i = 0 gives 0 and not 0 * inf.
    """
    twice = -2 * score_error
    others_at_least = (totals.lowest - totals.raised).clamp(min=-_LARGEST_EXPONENT).exp()
    upper = (others_at_least - twice.expm1()).reciprocal()
    # Not below its own float64 rounding error, which exp(2 d_i) can make matter: only this way does the end fall.
    rounding = (score_error + 1) * (4 * torch.finfo(torch.float64).eps)
    others_at_most = torch.maximum(totals.highest - totals.raised, rounding).expm1()
    own = twice.exp()
    lower = own / (own + others_at_most)
    return PerturbedSoftmax(
        p=p,
        upper=upper,
        interval=torch.maximum(upper - p, p - lower),
        first_order=-torch.expm1(-score_error) / others_at_least,
    )


def logsumexp_shift(totals: LogTotals) -> Float64[Tensor, "*rows 1"]:
    """The largest |log sum exp(scores + e) - log sum exp(scores)| over all |e_i| <= d_i.

    Log-sum-exp grows with every score, so the extremes are at e = +d and e = -d. To first order this is sum_i p_i d_i:
    each score's error counts as much as its token weighs.
    """
    return torch.maximum(totals.highest, -totals.lowest)
