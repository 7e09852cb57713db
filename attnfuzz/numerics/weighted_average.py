"""Rounding error of o = sum_i p_i v_i / sum_i p_i as attention kernels compute it, scores already in error.

Three sources, added up in `weighted_average_error`:

1. Score errors change numerator and denominator alike. That moves o by at most the smallest of
       sum_i c_i |v_i - o|                (first order, `PerturbedSoftmax.first_order`)
       sum_i |p'_i - p_i| |v_i - o|       (since the weights still sum to 1, `PerturbedSoftmax.interval`)
       the convex hull: the largest |v_i - o| of any token that can have weight, plus what the others can add.
   The last one keeps the bound meaningful where scores are so large that float32 cannot order them.
2. Errors of the numerator alone: weights rounded before they multiply V, the n-term sum, rescaling.
3. Errors of the denominator alone: its n-term sum, rescaling; these act as a relative error of o.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.numerics.perturbed_softmax import PerturbedSoftmax
from attnfuzz.numerics.units import FLOAT32_ROUNDOFF, SMALLEST_NORMAL_FLOAT32, gamma

__all__ = ["AverageRoundings", "weighted_average_error"]

_NEGLIGIBLE_WEIGHT = 1e-8

# On every |w_i v_i|: the product (1), weights normalised before use (a division by `div.full.f32` or through the
# reciprocal, 2 ulp = 4), the weight of a split (4) and its product (1).
_ROUNDINGS_PER_PRODUCT = 10

# On the sums, beyond one addition per token: the final division (4), a neutral first term, padding.
_ROUNDINGS_PER_SUM = 8


@dataclass(frozen=True)
class AverageRoundings:
    """Units of the roundings made between the softmax weights and the float32 result.

    `sum_roundoff`: of an addition. `weight_roundoff` and `weight_absolute` (for the smallest): of the weights before
    they multiply V. `value_roundoff`: of V itself. `partial_roundoff`, `partial_absolute`: of stored partials, where
    the average `is_split`.
    """

    sum_roundoff: float
    weight_roundoff: float = 0.0
    weight_absolute: float = 0.0
    value_roundoff: float = 0.0
    partial_roundoff: float = 0.0
    partial_absolute: float = 0.0
    is_split: bool = False


def weighted_average_error(
    softmax: PerturbedSoftmax,
    values: Float64[Tensor, "rows num_tokens head_size"],
    average: Float64[Tensor, "rows head_size"],
    num_rescales: Float64[Tensor, "rows num_tokens"],
    roundings: AverageRoundings,
) -> Float64[Tensor, "rows head_size"]:
    """Largest error of the computed average before its final rounding.

    `num_rescales[row, i]`: how many times an accumulator that holds token i can be multiplied by a factor other than 1.
    With b the effect of the scores, N the numerator's error over the exact denominator and f the denominator's relative
    error: |o' - o| <= b + (N + f (|o| + b)) / (1 - f).
    """
    deviations = (values - average.unsqueeze(-2)).abs()
    moved = _score_effect(softmax, deviations)
    numerator = _numerator_error(softmax, values, deviations, num_rescales, roundings)
    denominator = denominator_error(softmax, num_rescales, roundings.sum_roundoff).unsqueeze(-1)
    return moved + (numerator + denominator * (average.abs() + moved)) / (1 - denominator)


def denominator_error(
    softmax: PerturbedSoftmax, num_rescales: Float64[Tensor, "rows num_tokens"], sum_roundoff: float
) -> Float64[Tensor, " rows"]:
    """Largest relative error of sum_i p_i: one rounding for each addition and for each rescaling."""
    rescaled = _expected_at_most(softmax, num_rescales.unsqueeze(-1)).squeeze(-1)
    return gamma(num_rescales.shape[-1] + _ROUNDINGS_PER_SUM, sum_roundoff) + FLOAT32_ROUNDOFF * rescaled


def _score_effect(
    softmax: PerturbedSoftmax, deviations: Float64[Tensor, "rows num_tokens head_size"]
) -> Float64[Tensor, "rows head_size"]:
    can_have_weight = softmax.upper > _NEGLIGIBLE_WEIGHT
    hull = deviations.where(can_have_weight.unsqueeze(-1), 0.0).amax(-2)
    hull += _weighted(softmax.upper.where(~can_have_weight, 0.0), deviations)
    first_order = _weighted(softmax.first_order, deviations)
    return torch.minimum(torch.minimum(first_order, _weighted(softmax.interval, deviations)), hull)


def _numerator_error(
    softmax: PerturbedSoftmax,
    values: Float64[Tensor, "rows num_tokens head_size"],
    deviations: Float64[Tensor, "rows num_tokens head_size"],
    num_rescales: Float64[Tensor, "rows num_tokens"],
    roundings: AverageRoundings,
) -> Float64[Tensor, "rows head_size"]:
    """Numerator's error over the exact denominator.

    Every rounding of single products counts against sum_i p_i |v_i|. An addition errs by u times its result (u times
    the largest term on tensor cores), which is a sum over some subset of the p_i v_i whatever the order, tile, split or
    rescaling: it lies between the sum of the negative and that of the positive terms, so all additions together err
    by at most gamma_n times the larger of those two (`_largest_partial_sum`).

    Flushing to zero costs one smallest normal number for each operation and for each weight.
    """
    magnitudes = values.abs()
    largest = torch.maximum(magnitudes, deviations)
    weights_rounded = _weight_rounding_error(softmax, largest, roundings)
    once = _ROUNDINGS_PER_PRODUCT * FLOAT32_ROUNDOFF + roundings.value_roundoff + roundings.partial_roundoff
    products = once * _expected_at_most(softmax, magnitudes)
    rescaled = FLOAT32_ROUNDOFF * _expected_at_most(softmax, magnitudes * num_rescales.unsqueeze(-1))
    num_operations = values.shape[-2] + _ROUNDINGS_PER_SUM
    summed = gamma(num_operations, roundings.sum_roundoff) * _largest_partial_sum(softmax, values)
    flushed = SMALLEST_NORMAL_FLOAT32 * (4 * num_operations + largest.sum(-2))
    second_order = 1 + roundings.weight_roundoff + roundings.value_roundoff
    return weights_rounded + second_order * (products + rescaled + summed) + roundings.partial_absolute + flushed


def _weight_rounding_error(
    softmax: PerturbedSoftmax, largest: Float64[Tensor, "rows num_tokens head_size"], roundings: AverageRoundings
) -> Float64[Tensor, "rows head_size"]:
    """Error from rounding weights, e.g. to float16: each by at most max(u w, eta), and by no more than w itself.

    This holds in whatever scale the kernel rounds: exp(s_i - running max) is at least p_i, and later rescaling shrinks
    the error with the weight. If the kernel also sums the rounded weights for its denominator, the error acts on
    |v_i - o| instead of |v_i|; `largest` is the larger of both.
    """
    u, eta = roundings.weight_roundoff, roundings.weight_absolute
    each = torch.minimum((u * softmax.upper).clamp(min=eta), softmax.upper) if u else torch.zeros_like(softmax.upper)
    return torch.minimum(_weighted(each, largest), u * largest.amax(-2) + eta * largest.sum(-2))


def _largest_partial_sum(
    softmax: PerturbedSoftmax, values: Float64[Tensor, "rows num_tokens head_size"]
) -> Float64[Tensor, "rows head_size"]:
    positive_sum = _expected_at_most(softmax, values.clamp(min=0))
    negative_sum = _expected_at_most(softmax, (-values).clamp(min=0))
    return torch.maximum(positive_sum, negative_sum)


def _expected_at_most(
    softmax: PerturbedSoftmax, magnitudes: Float64[Tensor, "rows num_tokens head_size"]
) -> Float64[Tensor, "rows head_size"]:
    """Upper limit of sum_i p'_i m_i for m >= 0: the weights sum to 1, so it cannot exceed the largest m either."""
    return torch.minimum(_weighted(softmax.upper, magnitudes), magnitudes.amax(-2))


def _weighted(
    weights: Float64[Tensor, "rows num_tokens"], values: Float64[Tensor, "rows num_tokens head_size"]
) -> Float64[Tensor, "rows head_size"]:
    return torch.einsum("rn,rnd->rd", weights, values)
