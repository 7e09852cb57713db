"""Everything about a row's roundings that does not depend on its numbers: what multiplies what in the error bound.

A row is one KV head of one sequence, or one pair of states to be merged. Rows of many cases are bounded at once, so
each has units of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.numerics.arithmetic import (
    EXP_ERROR,
    FLOAT32_ROUNDOFF,
    LOG_ERROR,
    SMALLEST_NORMAL_FLOAT32,
    Arithmetic,
    Number,
    gamma,
)
from attnfuzz.numerics.scores import (
    ScoreError,
    VariantUnits,
    declared_exponent_error,
    dot_product_error,
    exponent_error,
    normaliser_error,
    score_copies_error,
    split_exponent_error,
    variant_score_errors,
)

# On every |w_i v_i|: the product (1), weights normalised before use (a division by `div.full.f32` or through the
# reciprocal, 2 ulp = 4), the weight of a split (4) and its product (1).
_ROUNDINGS_PER_PRODUCT = 10

# On the sums, beyond one addition per token: the final division (4), a neutral first term, padding.
_ROUNDINGS_PER_SUM = 8

# Softmax does not see an error common to all scores, so rounding the scale, log2(e) and their product (3) acts on
# s_i - max s only; there too: the subtraction, the product with log2(e) and a separately scaled maximum (3). The
# products with scale and log2(e) round each score by itself (2).
_OUT_EXPONENT = exponent_error(of_score=2, of_difference=6)

# LSE sees the scale, log2(e), their product and the product with the score (4), and a separately scaled maximum (1,
# on max s = s_i + (max s - s_i)).
_LSE_EXPONENT = exponent_error(of_score=5, of_difference=7)

# The LSEs that a merge takes for scores are exact. In base 2: the constant log2(e) acts on the difference, its product
# on each; the subtraction.
_MERGED_OUT_EXPONENT = exponent_error(of_score=1, of_difference=3)
_MERGED_LSE_EXPONENT = exponent_error(of_score=2, of_difference=3)

_SCORE_ERRORS = 3

_SMALLEST_OPERAND = SMALLEST_NORMAL_FLOAT32 / (2 * FLOAT32_ROUNDOFF)
"""An operand or a product below the smallest normal number may be flushed to zero. Two roundings of a product with an
operand of this size make up for that, and each product has more (`dot_product_error`)."""


@dataclass(frozen=True)
class RowUnits:
    """Per row, each `[rows 1 1]`.

    - `scale`: of the scores; `score_limit`, `query_limit`: as in `Arithmetic`. Of their errors (`ScoreError`)
      `score_product` (times |scale|), `per_score`, `per_distance` and `score_constant`, three of each: for `out`, for
      the LSE, and of what copies of a score differ by. Of the first constant, `unmoved` does not move the score itself,
      but exp of it.
    - `query_floor`, `key_floor`: added to each |q_d| that is not 0, and to each |k_d|, for what numbers err by whose
      error is absolute. A number below the smallest normal one may be taken for 0, so neither is 0.
    - `weight`, `weight_absolute`, `sums_rounded`: as in `Arithmetic`.
    - Of the numerator: `product` times sum_i p_i |v_i|, `rescale` times the same weighted with the number of rescales,
      `numerator_sum` times the largest partial sum, and `numerator_absolute`.
    - `denominator_sum`: relative error of sum_i p_i by its additions.
    - `by_lse`, `stored`, `stored_absolute`: as in `Arithmetic`.
    - Of the LSE: `lse` times |lse|, and `logarithm`.
    - `variant`: None where no row has a soft cap, ALiBi or a sink. Else `score_product` and `per_score` mean what
      `attnfuzz.numerics.scores` says.
    """

    score_product: Float64[Tensor, "3 rows 1 1"]
    per_score: Float64[Tensor, "3 rows 1 1"]
    per_distance: Float64[Tensor, "3 rows 1 1"]
    score_constant: Float64[Tensor, "3 rows 1 1"]
    unmoved: Float64[Tensor, "rows 1 1"]
    scale: Float64[Tensor, "rows 1 1"]
    score_limit: Float64[Tensor, "rows 1 1"]
    query_limit: Float64[Tensor, "rows 1 1"]
    query_floor: Tensor
    key_floor: Tensor
    weight: Tensor
    weight_absolute: Tensor
    sums_rounded: Tensor
    product: Tensor
    rescale: Tensor
    numerator_sum: Tensor
    numerator_absolute: Tensor
    denominator_sum: Tensor
    by_lse: Tensor
    stored: Tensor
    stored_absolute: Tensor
    lse: Tensor
    logarithm: Tensor
    variant: VariantUnits | None = field(default=None, kw_only=True)

    @classmethod
    def of_columns(cls, columns: Float64[Tensor, "units rows"]) -> RowUnits:
        """The units that `attention_units` and `merge_units` give, on any device, one column for each row."""
        columns = columns[:, :, None, None]
        of_scores, others = columns.tensor_split([len(fields(ScoreError)) * _SCORE_ERRORS])
        variant = None
        if len(others) > _NUM_OTHERS:
            others, of_variant = others.tensor_split([_NUM_OTHERS])
            variant = VariantUnits.of_columns(of_variant)
        return cls(*of_scores.chunk(len(fields(ScoreError))), *others.unbind(), variant=variant)

    def __getitem__(self, rows: slice) -> RowUnits:
        parts = (getattr(self, each.name)[..., rows, :, :] for each in fields(self)[:-1])
        return RowUnits(*parts, variant=self.variant and self.variant[rows])


_NUM_OTHERS = len(fields(RowUnits)) - len(fields(ScoreError)) - 1


def attention_units(
    arithmetic: Arithmetic,
    *,
    scale: Float64[Tensor, " rows"],
    head_size: Float64[Tensor, " rows"],
    num_tokens: Float64[Tensor, " rows"],
) -> Float64[Tensor, "units rows"]:
    """`RowUnits` of one KV head of one sequence each.

    Raises `ValueError` for so many tokens that a float32 sum of them means nothing.
    """
    log_num_tokens, arithmetic = num_tokens.log(), arithmetic.of_rows(num_tokens)
    common = dot_product_error(head_size, arithmetic) + split_exponent_error(log_num_tokens) * arithmetic.is_split
    common += declared_exponent_error(scale, arithmetic)
    copies = score_copies_error(head_size, log_num_tokens, arithmetic)
    return _columns(
        arithmetic,
        scale=scale,
        of_scores=(common + _OUT_EXPONENT, common + _LSE_EXPONENT, copies),
        num_tokens=num_tokens,
        num_stages=1 + arithmetic.is_split,
    )


def variant_units(
    arithmetic: Arithmetic,
    *,
    scale: Float64[Tensor, " rows"],
    head_size: Float64[Tensor, " rows"],
    num_tokens: Float64[Tensor, " rows"],
    soft_cap: Float64[Tensor, " rows"],
    is_biased: Float64[Tensor, " rows"],
    reach: Float64[Tensor, " rows"],
    has_sink: Float64[Tensor, " rows"],
) -> Float64[Tensor, "units rows"]:
    """`RowUnits` of rows with variants. `num_tokens` counts a sink; for the others see `VariantUnits`."""
    arithmetic = arithmetic.of_rows(num_tokens)
    of_scores, per_dot = variant_score_errors(
        arithmetic, scale=scale, head_size=head_size, num_tokens=num_tokens, soft_cap=soft_cap, is_biased=is_biased
    )
    columns = _columns(
        arithmetic, scale=scale, of_scores=of_scores, num_tokens=num_tokens, num_stages=1 + arithmetic.is_split
    )
    return torch.cat([columns, per_dot, torch.stack([soft_cap, reach, has_sink])])


def merge_units(arithmetic: Arithmetic, *, lse_unit: Float64[Tensor, " rows"]) -> Float64[Tensor, "units rows"]:
    """`RowUnits` of a merge: attention over two tokens with the LSEs as scores. `lse_unit`: logarithm of their base."""
    return _columns(
        arithmetic,
        scale=lse_unit,
        of_scores=(_MERGED_OUT_EXPONENT, _MERGED_LSE_EXPONENT, normaliser_error(math.log(2), arithmetic)),
        num_tokens=torch.full_like(lse_unit, 2),
        num_stages=1,
    )


def _columns(
    arithmetic: Arithmetic,
    *,
    scale: Tensor,
    of_scores: tuple[ScoreError, ScoreError, ScoreError],
    num_tokens: Tensor,
    num_stages: Number,
) -> Float64[Tensor, "units rows"]:
    """Weights and values that are rounded before they are multiplied carry that into every later error: second order.

    Flushing to zero costs one smallest normal number for each operation and for each weight.
    """
    log_num_tokens = num_tokens.log()
    num_operations = num_tokens + _ROUNDINGS_PER_SUM
    additions = gamma(num_operations, arithmetic.addition)
    second_order = 1 + arithmetic.weight + arithmetic.value + arithmetic.tile
    is_root = torch.as_tensor(arithmetic.key_floor, dtype=torch.float64, device="cpu") > 0
    scaled = torch.where(is_root, scale.abs().sqrt(), scale.abs()).clamp(min=_SMALLEST_OPERAND)
    of_sums = arithmetic.tile + arithmetic.partial
    per_product = _ROUNDINGS_PER_PRODUCT * FLOAT32_ROUNDOFF + arithmetic.value + of_sums
    absolute = arithmetic.partial_absolute + arithmetic.tile_absolute * num_tokens
    in_splits = split_exponent_error(log_num_tokens) * arithmetic.is_split
    units: dict[str, Number] = {  # in the order of RowUnits, where it goes on
        "unmoved": EXP_ERROR + in_splits.constant + arithmetic.exponential,
        "scale": scale,
        "score_limit": arithmetic.score_limit,
        "query_limit": arithmetic.query_limit,
        "query_floor": _SMALLEST_OPERAND + arithmetic.query_floor / scaled + arithmetic.own_query_floor,
        "key_floor": _SMALLEST_OPERAND + arithmetic.key_floor / scaled,
        "weight": arithmetic.weight,
        "weight_absolute": arithmetic.weight_absolute,
        "sums_rounded": arithmetic.sums_rounded,
        "product": second_order * per_product,
        "rescale": second_order * FLOAT32_ROUNDOFF,
        "numerator_sum": second_order * additions,
        "numerator_absolute": absolute + 4 * SMALLEST_NORMAL_FLOAT32 * num_operations,
        "denominator_sum": additions,
        "by_lse": arithmetic.by_lse,
        "stored": arithmetic.stored,
        "stored_absolute": arithmetic.stored_absolute,
        "lse": num_stages * 3 * FLOAT32_ROUNDOFF,
        "logarithm": num_stages * (LOG_ERROR * (1 + log_num_tokens) + 4 * FLOAT32_ROUNDOFF * log_num_tokens),
    }
    scores = [
        *(error.per_product * scale.abs() for error in of_scores),
        *(error.per_score for error in of_scores),
        *(error.per_distance for error in of_scores),
        *(error.constant for error in of_scores),
    ]
    columns = (torch.as_tensor(unit, dtype=torch.float64, device="cpu") for unit in (*scores, *units.values()))
    return torch.stack([column.expand_as(num_tokens) for column in columns])
