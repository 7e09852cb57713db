"""Rounding error of o = sum_i p_i v_i / sum_i p_i and of its log-sum-exp, given how far each score is off.

How far softmax weights and their log-sum-exp can move when each score moves by a known amount: for condition numbers
and rounding errors of these two functions see Blanchard, Higham, Higham, Accurately computing the log-sum-exp and
softmax functions, IMA J. Numer. Anal. 41 (2021).

Three sources of the average's error are added up in `weighted_average_error`:

1. Score errors change numerator and denominator alike. That moves o by at most the smallest of

       sum_i c_i |v_i - o|                (first order, `PerturbedSoftmax.first_order`)
       sum_i |p'_i - p_i| |v_i - o|       (since the weights still sum to 1, `PerturbedSoftmax.interval`)
       the convex hull: the largest |v_i - o| of any token that can have weight, plus what the others can add.

   The last one keeps the bound meaningful where scores are so large that float32 cannot order them.
2. Errors of the numerator alone: weights from other copies of the scores than in the denominator
   (`scores.score_copies_error`), weights rounded before they multiply V, the n-term sum, rescaling.
3. Errors of the denominator alone: its n-term sum, rescaling; these act as a relative error of o.

Rows that are shorter than the longest repeat one of their tokens, not `present` (0.0, else 1.0) and with weight 0: no
weighted sum and no maximum sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.numerics.arithmetic import FLOAT32_ROUNDOFF, SMALLEST_NORMAL_FLOAT32
from attnfuzz.numerics.row_units import RowUnits

# exp(-700) is above 0 in float64; a weight divided by it is never the smallest of the bounds it enters.
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class LogTotals:
    """Totals of weights p whose scores move by d_i: log sum_i p_i exp(-d_i), log sum_i p_i exp(d_i), log p_i + d_i."""

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
    - log l and max s + log l: `logarithm_error`.

    Storing lse in base 2 changes nothing: its rounding is relative, so it converts to the same error in natural
    logarithms.
    """
    return shift - torch.log1p(-sum_error) + logarithm_error(lse, units)


def logarithm_error(lse: Float64[Tensor, "rows group 1"], units: RowUnits) -> Float64[Tensor, "rows group 1"]:
    """How far max s + log l may be from what the sum l makes of it, whatever error l has.

    - log l: `LOG_ERROR (1 + log l)`, and 1 <= l <= n.
    - max s + log l: rounded once, and once more in base 2 for each of the products with log 2 and that constant: three
      units of |lse| <= |max s| + log n, or of max s and log l each, where |max s| <= |lse| + log n.

    Both come once for each stage: a split kernel takes a second logarithm.
    """
    return torch.addcmul(units.logarithm, units.lse, lse.abs())


def normalised_by_lse(
    denominator: Float64[Tensor, "rows group 1"], logarithm: Float64[Tensor, "rows group 1"]
) -> Float64[Tensor, "rows group 1"]:
    """Relative error of sum_i p_i where exp(-lse) stands for one over it.

    With f that of the sum (`denominator_error`) and d that of its logarithm (`logarithm_error`), the result is divided
    by (1 + t) exp(e) for some |t| <= f and |e| <= d, which is at least 1 - f' = (1 - f) exp(-d); above 1, it takes
    no more than 1 - 1 / ((1 + f) exp(d)) <= f' off. What weights have apart from the sum: `scores.normaliser_error`.
    """
    return 1 - (1 - denominator) * (-logarithm).exp()


_NEGLIGIBLE_WEIGHT = 1e-8

_MOST_OF_SUM = 0.99
"""Largest part of a sum of weights that is taken away: what is left of it has a logarithm."""


@dataclass(frozen=True)
class WeightedAverage:
    """The terms that are averaged, and the exact `average` o.

    `num_rescales[row, head, i]`: how many times an accumulator that holds token i can be multiplied by a factor other
    than 1. `copies_apart`: by how much, relatively, a token's weight in the numerator may differ from that in the
    denominator.
    """

    values: Float64[Tensor, "rows num_tokens v_head_size"]
    average: Float64[Tensor, "rows group v_head_size"]
    present: Float64[Tensor, "rows 1 num_tokens"]
    num_rescales: Float64[Tensor, "rows group num_tokens"]
    copies_apart: Float64[Tensor, "rows group num_tokens"]


def denominator_error(
    softmax: PerturbedSoftmax, num_rescales: Float64[Tensor, "rows group num_tokens"], units: RowUnits
) -> Float64[Tensor, "rows group 1"]:
    """Largest relative error of sum_i p_i: one rounding for each addition and for each rescaling."""
    on_average = (softmax.upper * num_rescales).sum(-1, keepdim=True)
    rescaled = torch.minimum(on_average, num_rescales.amax(-1, keepdim=True))
    return torch.add(units.denominator_sum, rescaled, alpha=FLOAT32_ROUNDOFF)


def rounded_weights_error(
    softmax: PerturbedSoftmax,
    log_p: Float64[Tensor, "rows group num_tokens"],
    score_error: Float64[Tensor, "rows group num_tokens"],
    units: RowUnits,
) -> Float64[Tensor, "rows group 1"]:
    """Relative error of sum_i p_i where the rounded weights are summed, which only the LSE sees: see `_weight_error`.

    Weights are summed as exp(s_i - running max) >= p_i / p_max, so p_i errs by at most max(u p_i, eta p_max) and by no
    more than itself.

    The running maximum is a score, no lower than s_i. With c = max_j (s_j + d_j) and the errors d of scores and exp, it
    is at most c, so the weight is between exp(-(c - s_i + d_i)) and 1, but for errors of exp. Less than u / 2 below 1,
    half the way to the next number, it becomes 1: the largest one, those equal to it, and those near to it. Then it is
    exp(s_i) in units of exp of a number between s_i - d_i and c. Of that distance from s_i the errors of scores have
    been charged with d_i (`logsumexp_shift`), which leaves c - (s_i + d_i): 0 for the largest, the distance between
    both scores for others of the same error. In each split the maximum is lower, and so less is lost.

    A numerator gains nothing from that: torch's softmax, and whoever divides by the sum before weights are rounded,
    rounds p_i itself, of which equal ones all lose the same, up to u p_i.
    """
    p_max = softmax.p.amax(-1, keepdim=True)
    each = torch.minimum(torch.maximum(units.weight * softmax.upper, units.weight_absolute * p_max), softmax.upper)
    highest = log_p + score_error
    ceiling = highest.amax(-1, keepdim=True)
    becomes_one = ceiling - (log_p - score_error) < units.weight / 2
    each = torch.where(becomes_one, torch.minimum(each, (ceiling - highest).expm1() * softmax.upper), each)
    summed = each.sum(-1, keepdim=True)
    return units.sums_rounded * summed.clamp(max=_MOST_OF_SUM)


def weighted_average_error(
    softmax: PerturbedSoftmax, given: WeightedAverage, denominator: Float64[Tensor, "rows group 1"], units: RowUnits
) -> Float64[Tensor, "rows group v_head_size"]:
    """Largest error of the computed average before its final rounding.

    With b the effect of the scores, N the numerator's error over the exact denominator and f the denominator's relative
    error (`denominator`): |o' - o| <= b + (N + f (|o| + b)) / (1 - f).
    """
    deviations = (given.values.unsqueeze(1) - given.average.unsqueeze(2)).abs_()
    numerator = _numerator_error(softmax, given, deviations, units)
    moved = _score_effect(softmax, deviations)
    return moved + torch.addcmul(numerator, denominator, given.average.abs() + moved) / (1 - denominator)


def _score_effect(
    softmax: PerturbedSoftmax, deviations: Float64[Tensor, "rows group num_tokens v_head_size"]
) -> Float64[Tensor, "rows group v_head_size"]:
    """Overwrites `deviations`, which is large."""
    has_weight = (softmax.upper > _NEGLIGIBLE_WEIGHT).to(torch.float64)
    weights = torch.stack([softmax.first_order, softmax.interval, softmax.upper * (1 - has_weight)], dim=-2)
    first_order, interval, of_others = (weights @ deviations).unbind(-2)
    hull = deviations.mul_(has_weight.unsqueeze(-1)).amax(-2) + of_others
    return torch.minimum(torch.minimum(first_order, interval), hull)


def _numerator_error(
    softmax: PerturbedSoftmax,
    given: WeightedAverage,
    deviations: Float64[Tensor, "rows group num_tokens v_head_size"],
    units: RowUnits,
) -> Float64[Tensor, "rows group v_head_size"]:
    """Numerator's error over the exact denominator.

    Every rounding of single products counts against sum_i p_i |v_i|. An addition errs by u times its result (u times
    the largest term on tensor cores), which is a sum over some subset of the p_i v_i whatever the order, tile, split or
    rescaling: it lies between the sum of the negative and that of the positive terms, so all additions together err
    by at most gamma_n times the larger of those two.

    The weights p'_i sum to 1 besides each being at most `upper`, so no weighted sum exceeds the largest |v_i|.
    """
    num_rows, group, v_head_size = given.average.shape
    by_sign = torch.cat([given.values, -given.values], dim=-1).clamp_(min=0)  # positive parts, then negative ones
    largest_by_sign = by_sign.amax(1).view(num_rows, 1, 2, v_head_size)
    largest = largest_by_sign.amax(2)
    of_each = torch.addcmul(given.copies_apart, units.rescale, given.num_rescales)  # on its weight, relatively
    weights = torch.cat([softmax.upper, softmax.upper * of_each], dim=1)
    sums = (weights @ by_sign).view(num_rows, 2, group, 2, v_head_size)
    partial_sum = torch.minimum(sums[:, 0], largest_by_sign).amax(2)
    products, on_weights = sums.sum(3).unbind(1)
    products = torch.minimum(products, largest)
    on_weights = torch.minimum(on_weights, largest * of_each.amax(-1, keepdim=True))
    error = _weight_error(softmax, given, deviations, largest_by_sign, units)
    error = torch.addcmul(error + units.numerator_absolute, units.product, products)
    return torch.addcmul(error + on_weights, units.numerator_sum, partial_sum)


def _weight_error(
    softmax: PerturbedSoftmax,
    given: WeightedAverage,
    deviations: Float64[Tensor, "rows group num_tokens v_head_size"],
    largest_by_sign: Float64[Tensor, "rows 1 2 v_head_size"],
    units: RowUnits,
) -> Float64[Tensor, "rows group v_head_size"]:
    """Error from rounding weights, e.g. to float16: each by at most max(u w, eta), and by no more than w itself.

    This holds in whatever scale the kernel rounds: exp(s_i - running max) is at least p_i, and later rescaling shrinks
    the error with the weight. If the kernel also sums the rounded weights for its denominator, the error acts on
    |v_i - o| instead of |v_i|; the larger of both counts. With P the largest v_i and N the largest -v_i, both at least
    0, no |v_i - o| is larger than P - o and N + o. On top of that every weight that is flushed to zero costs a smallest
    normal number, whether or not weights are rounded.
    """
    positive, negative = largest_by_sign.unbind(2)
    largest = torch.maximum(positive, negative).maximum(positive - given.average).maximum(negative + given.average)
    each = torch.minimum(torch.maximum(units.weight * softmax.upper, units.weight_absolute), softmax.upper)
    weights = torch.stack([each, given.present.expand_as(each)], dim=-2)
    by_weight, total = (weights @ torch.maximum(given.values.abs().unsqueeze(1), deviations)).unbind(-2)
    rounded = torch.minimum(by_weight, torch.addcmul(units.weight * largest, units.weight_absolute, total))
    return torch.add(rounded, total, alpha=SMALLEST_NORMAL_FLOAT32)


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
