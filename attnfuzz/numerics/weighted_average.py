"""Rounding error of o = sum_i p_i v_i / sum_i p_i as attention kernels compute it, scores already in error.

Three sources, added up in `weighted_average_error`:

1. Score errors change numerator and denominator alike. That moves o by at most the smallest of
       sum_i c_i |v_i - o|                (first order, `PerturbedSoftmax.first_order`)
       sum_i |p'_i - p_i| |v_i - o|       (since the weights still sum to 1, `PerturbedSoftmax.interval`)
       the convex hull: the largest |v_i - o| of any token that can have weight, plus what the others can add.
   The last one keeps the bound meaningful where scores are so large that float32 cannot order them.
2. Errors of the numerator alone: weights rounded before they multiply V, the n-term sum, rescaling.
3. Errors of the denominator alone: its n-term sum, rescaling; these act as a relative error of o.

Rows that are shorter than the longest repeat one of their tokens, not `present` (0.0, else 1.0) and with weight 0: no
weighted sum and no maximum sees it.
"""

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.numerics.perturbed_softmax import PerturbedSoftmax
from attnfuzz.numerics.row_units import RowUnits
from attnfuzz.numerics.units import FLOAT32_ROUNDOFF, SMALLEST_NORMAL_FLOAT32

__all__ = ["denominator_error", "weighted_average_error"]

_NEGLIGIBLE_WEIGHT = 1e-8


def weighted_average_error(
    softmax: PerturbedSoftmax,
    values: Float64[Tensor, "rows num_tokens head_size"],
    average: Float64[Tensor, "rows group head_size"],
    present: Float64[Tensor, "rows 1 num_tokens"],
    num_rescales: Float64[Tensor, "rows group num_tokens"],
    denominator: Float64[Tensor, "rows group 1"],
    units: RowUnits,
) -> Float64[Tensor, "rows group head_size"]:
    """Largest error of the computed average before its final rounding.

    `num_rescales[row, head, i]`: how many times an accumulator that holds token i can be multiplied by a factor other
    than 1. With b the effect of the scores, N the numerator's error over the exact denominator and f the denominator's
    relative error (`denominator`): |o' - o| <= b + (N + f (|o| + b)) / (1 - f).
    """
    deviations = (values.unsqueeze(1) - average.unsqueeze(2)).abs_()
    moved = _score_effect(softmax, deviations)
    numerator = _numerator_error(softmax, values, deviations, present, num_rescales, units)
    return moved + torch.addcmul(numerator, denominator, average.abs() + moved) / (1 - denominator)


def denominator_error(
    softmax: PerturbedSoftmax, num_rescales: Float64[Tensor, "rows group num_tokens"], units: RowUnits
) -> Float64[Tensor, "rows group 1"]:
    """Largest relative error of sum_i p_i: one rounding for each addition and for each rescaling."""
    on_average = (softmax.upper * num_rescales).sum(-1, keepdim=True)
    rescaled = torch.minimum(on_average, num_rescales.amax(-1, keepdim=True))
    return units.denominator_sum + FLOAT32_ROUNDOFF * rescaled


def _score_effect(
    softmax: PerturbedSoftmax, deviations: Float64[Tensor, "rows group num_tokens head_size"]
) -> Float64[Tensor, "rows group head_size"]:
    can_have_weight = softmax.upper > _NEGLIGIBLE_WEIGHT
    others = softmax.upper.where(~can_have_weight, 0.0)
    weights = torch.stack([softmax.first_order, softmax.interval, others], dim=-2)
    first_order, interval, of_others = (weights @ deviations).unbind(-2)
    hull = deviations.where(can_have_weight.unsqueeze(-1), 0.0).amax(-2) + of_others
    return torch.minimum(torch.minimum(first_order, interval), hull)


def _numerator_error(
    softmax: PerturbedSoftmax,
    values: Float64[Tensor, "rows num_tokens head_size"],
    deviations: Float64[Tensor, "rows group num_tokens head_size"],
    present: Float64[Tensor, "rows 1 num_tokens"],
    num_rescales: Float64[Tensor, "rows group num_tokens"],
    units: RowUnits,
) -> Float64[Tensor, "rows group head_size"]:
    """Numerator's error over the exact denominator.

    Every rounding of single products counts against sum_i p_i |v_i|. An addition errs by u times its result (u times
    the largest term on tensor cores), which is a sum over some subset of the p_i v_i whatever the order, tile, split or
    rescaling: it lies between the sum of the negative and that of the positive terms, so all additions together err
    by at most gamma_n times the larger of those two.

    Weights are limited by p'_i, which sum to 1: no weighted sum of m_i >= 0 is larger than the largest m_i.
    """
    signs = torch.cat([values, -values], dim=-1).clamp_(min=0)  # positive parts, then negative ones
    weights = torch.cat([softmax.upper, softmax.upper * num_rescales], dim=1)
    num_rows, group, head_size = deviations.shape[0], deviations.shape[1], deviations.shape[-1]
    sums = (weights @ signs).view(num_rows, 2, group, 2, head_size)
    largest_of_sign = signs.amax(1).view(num_rows, 1, 2, head_size)
    partial_sum = torch.minimum(sums[:, 0], largest_of_sign).amax(2)
    products, rescaled = sums.sum(3).unbind(1)
    magnitudes = values.abs().unsqueeze(1)
    products = torch.minimum(products, largest_of_sign.amax(2))
    rescaled = torch.minimum(rescaled, (magnitudes * num_rescales.unsqueeze(-1)).amax(-2))
    error = _weight_errors(softmax, torch.maximum(magnitudes, deviations), present, units) + units.numerator_absolute
    error = torch.addcmul(error, units.product, products)
    error = torch.addcmul(error, units.rescale, rescaled)
    return torch.addcmul(error, units.numerator_sum, partial_sum)


def _weight_errors(
    softmax: PerturbedSoftmax,
    largest: Float64[Tensor, "rows group num_tokens head_size"],
    present: Float64[Tensor, "rows 1 num_tokens"],
    units: RowUnits,
) -> Float64[Tensor, "rows group head_size"]:
    """Error from rounding weights, e.g. to float16: each by at most max(u w, eta), and by no more than w itself.

    This holds in whatever scale the kernel rounds: exp(s_i - running max) is at least p_i, and later rescaling shrinks
    the error with the weight. If the kernel also sums the rounded weights for its denominator, the error acts on
    |v_i - o| instead of |v_i|; `largest` is the larger of both. On top of that every weight that is flushed to zero
    costs a smallest normal number, whether or not weights are rounded.
    """
    each = torch.minimum(torch.maximum(units.weight * softmax.upper, units.weight_absolute), softmax.upper)
    weights = torch.stack([each, present.expand_as(each)], dim=-2)
    by_weight, summed = (weights @ largest).unbind(-2)
    rounded = torch.minimum(by_weight, units.weight * largest.amax(-2) + units.weight_absolute * summed)
    return rounded + SMALLEST_NORMAL_FLOAT32 * summed
