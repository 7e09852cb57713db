"""Exact softmax average, its log-sum-exp, and the bounds of both, for many rows at once.

A row is one KV head of one sequence with the group of query heads that read it, or one pair of states to be merged.
Rows of all lengths and head sizes lie side by side, padded: a shorter row repeats one of its tokens, which is not
`present` (0.0, else 1.0) and gets no weight; head sizes are filled up with anything finite in V, whose columns do not
see each other, and with 0 in Q. The number of tensor operations depends on nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.numerics.arithmetic import EXP_ERROR
from attnfuzz.numerics.row_units import RowUnits
from attnfuzz.numerics.scores import count_rescales
from attnfuzz.numerics.softmax_error import (
    WeightedAverage,
    after_rounding,
    denominator_error,
    log_sum_exp_error,
    log_totals,
    logarithm_error,
    logsumexp_shift,
    normalised_by_lse,
    perturbed_softmax,
    rounded_weights_error,
    weighted_average_error,
)

_LARGEST_EXPONENT = 88.0
"""float32 has no number beyond exp of this."""


@dataclass(frozen=True)
class RowResult:
    """The exact result of each row and how far a kernel's may be from it; NaN where nothing is promised of it."""

    out: Float64[Tensor, "rows group v_head_size"]
    lse: Float64[Tensor, "rows group"]
    out_error: Float64[Tensor, "rows group v_head_size"]
    lse_error: Float64[Tensor, "rows group"]


def bound_rows(
    scores: Float64[Tensor, "rows group num_tokens"],
    products: Float64[Tensor, "rows group num_tokens"],
    values: Float64[Tensor, "rows num_tokens v_head_size"],
    present: Float64[Tensor, "rows 1 num_tokens"],
    units: RowUnits,
    *,
    rescales: bool,
) -> RowResult:
    """Average of `values` with the softmax of `scores` for weights, its log-sum-exp and their errors.

    Scores are finite, and of tokens that are not present no larger than the largest of the others. `products`:
    sum_d |q_d k_d|. `rescales`: whether a kernel may keep a running maximum.
    """
    common = torch.addcmul(units.score_constant, units.score_product, products)
    errors = torch.addcmul(common, units.per_score, scores.abs())
    return bound_scored_rows(scores, errors, values, present, units, rescales=rescales)


def bound_scored_rows(
    scores: Float64[Tensor, "rows group num_tokens"],
    errors_of_each: Float64[Tensor, "3 rows group num_tokens"],
    values: Float64[Tensor, "rows num_tokens v_head_size"],
    present: Float64[Tensor, "rows 1 num_tokens"],
    units: RowUnits,
    *,
    rescales: bool,
    shift: Float64[Tensor, "rows group 1"] | None = None,
) -> RowResult:
    """As `bound_rows`, given the scores' errors less what is in proportion to the distance from the largest score.

    `shift`: by how much, at most, a kernel may have all scores of a head shifted until it stores its LSE.
    """
    largest = scores.amax(-1, keepdim=True)
    distance = largest - scores
    exponent = present.log() - distance
    numerator = exponent.exp()
    total = numerator.sum(-1, keepdim=True)
    log_total = total.log()
    p, log_p, lse = numerator / total, exponent - log_total, largest + log_total
    out = p @ values

    score_errors = torch.addcmul(errors_of_each, units.per_distance, distance)
    errors, of_copies = score_errors[:2], score_errors[2]  # for out and for the LSE, and of copies
    if rescales:
        moves = (errors_of_each[0] - units.unmoved).clamp(min=0.0)
        num_rescales = count_rescales(log_p, lse, moves, present, shift)
        errors = errors.add(num_rescales, alpha=EXP_ERROR)
    else:
        num_rescales = torch.zeros_like(scores)
    totals = log_totals(log_p, errors)
    softmax = perturbed_softmax(p, errors[0], totals[0])
    sum_error = denominator_error(softmax, num_rescales, units)
    copies_apart = of_copies.clamp(max=_LARGEST_EXPONENT).expm1()
    given = WeightedAverage(values, out, present, num_rescales, copies_apart)
    stored = lse if shift is None else lse.abs() + shift
    normaliser = normalised_by_lse(sum_error, units.by_lse * logarithm_error(stored, units))
    out_error = weighted_average_error(softmax, given, normaliser, units)
    rounded_sum_error = sum_error + rounded_weights_error(softmax, log_p, score_errors[1], units)
    lse_error = log_sum_exp_error(stored, logsumexp_shift(totals[1]), rounded_sum_error, units)
    return RowResult(
        out=out,
        lse=lse.squeeze(-1),
        out_error=after_rounding(out_error, out, units),
        lse_error=lse_error.squeeze(-1),
    )
