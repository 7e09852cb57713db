"""Scores with a soft cap, ALiBi or a sink, and how wrong a kernel's can be.

With x = scale q.k, the score is s = c tanh(x / c), or x + m (t - p) for a slope m and a key t - p tokens from the
query's own position. A sink is one more token, whose score is given and whose value is 0. A window only leaves tokens
out.

* *Before the cap* x is wrong as any score is (`dot_product_error`), and y = x / c has further roundings: the scale, c
  and their quotient or reciprocal (1 + 1 + 4), and the product (1). The slope of tanh is 1 - tanh^2 <= 1, largest at
  the end of the interval that is nearest to 0: an error d of x moves s by at most d (1 - tanh^2((|x| - d) / c)), and
  never by more than 2c. Scores on the plateau keep next to nothing of it.
* *tanh* errs by `TANH_ERROR` absolutely, the approximate one relatively; both times c.
* *The bias* m (t - p) is written in two ways: with the distance, or with the position m t alone, which shifts all
  scores of a head (as FlashAttention does). Either is at most B = |m| (seq_len - 1), and whatever is rounded afterwards
  is at most |s| + B. The slope may be multiplied by log2(e) first (2), then by the distance (1); the sum rounds (1).
* *Afterwards* each score counts by itself: a rounding of the scale or of log2(e) is no longer common to all scores, as
  it is without a cap, a bias or a sink, so `out` takes the LSE's number of roundings. Of a cap, those of c and of its
  product with tanh are among them, in place of the scale's.
* *A sink* may be added in a stage of its own, out / (1 + exp(sink - lse)): such a case counts as split
  (`attnfuzz.judging.arithmetic`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from attnfuzz.numerics.arithmetic import Arithmetic
from attnfuzz.numerics.score_error import (
    ScoreError,
    declared_exponent_error,
    dot_copy_error,
    dot_product_error,
    exponent_error,
    split_exponent_error,
)
from attnfuzz.numerics.units import FLOAT32_ROUNDOFF, TANH_ERROR

__all__ = ["VariantRows", "VariantScores", "VariantUnits", "variant_score_errors", "variant_scores"]

_BEFORE_CAP = 7
_OF_SCORE, _OF_DIFFERENCE = 5, 7  # as for the LSE of plain attention
_COPY_OF_SCORE, _COPY_OF_DIFFERENCE = 2, 3  # as in `score_copies_error`
_OF_BIAS = 3


@dataclass(frozen=True)
class VariantUnits:
    """Per row. `soft_cap`: 0 for none. `reach`: tokens between the query and the sequence's first. `has_sink`: 1 or 0.

    `per_dot` times |x|: of the error before a cap, for `out`, for the LSE, and of what copies of a score differ by.
    """

    per_dot: Float64[Tensor, "3 rows 1 1"]
    soft_cap: Float64[Tensor, "rows 1 1"]
    reach: Float64[Tensor, "rows 1 1"]
    has_sink: Float64[Tensor, "rows 1 1"]

    @classmethod
    def of_columns(cls, columns: Float64[Tensor, "6 rows 1 1"]) -> VariantUnits:
        """The same as one tensor, in the order of the fields."""
        return cls(columns[:3], *columns[3:].unbind())

    def __getitem__(self, rows: slice) -> VariantUnits:
        return VariantUnits(*(getattr(self, field.name)[..., rows, :, :] for field in fields(self)))


@dataclass(frozen=True)
class VariantRows:
    """What the variants of some rows come to. `slope`, `sink`: of each query head, 0 where there is none.

    `distance`: key position minus query position, at most 0. `is_sink`: tokens from the sink on, which has no key.
    """

    slope: Float64[Tensor, "rows group 1"]
    sink: Float64[Tensor, "rows group 1"]
    distance: Float64[Tensor, "rows 1 num_tokens"]
    is_sink: Bool[Tensor, "rows 1 num_tokens"]

    @classmethod
    def of_heads(
        cls,
        alibi_slopes: Float64[Tensor, " num_q_heads"] | None,
        sinks: Float64[Tensor, " num_q_heads"] | None,
        num_rows: int,
        num_q_heads: int,
        num_keys: int,
        device: torch.device,
    ) -> VariantRows:
        """Of the KV heads of one sequence, whose last key is the query's own."""
        none = torch.zeros(num_q_heads, dtype=torch.float64, device=device)
        slope, sink = (none if of is None else of for of in (alibi_slopes, sinks))
        position = torch.arange(num_keys + int(sinks is not None), device=device)
        distance = (position - (num_keys - 1)).clamp(max=0).to(torch.float64)
        return cls(
            slope=slope.view(num_rows, -1, 1),
            sink=sink.view(num_rows, -1, 1),
            distance=distance.expand(num_rows, 1, -1),
            is_sink=(position >= num_keys).expand(num_rows, 1, -1),
        )

    def part(self, rows: slice, heads: slice) -> VariantRows:
        """Some query heads of some rows."""
        return VariantRows(self.slope[rows, heads], self.sink[rows, heads], self.distance[rows], self.is_sink[rows])


@dataclass(frozen=True)
class VariantScores:
    """Scores; their errors less what is in proportion to the distance from the largest; and B of the module's text."""

    scores: Float64[Tensor, "rows group num_tokens"]
    errors: Float64[Tensor, "3 rows group num_tokens"]
    shift: Float64[Tensor, "rows group 1"]


def variant_score_errors(
    arithmetic: Arithmetic,
    *,
    scale: Float64[Tensor, " rows"],
    head_size: Float64[Tensor, " rows"],
    num_tokens: Float64[Tensor, " rows"],
    soft_cap: Float64[Tensor, " rows"],
    is_biased: Float64[Tensor, " rows"],
) -> tuple[tuple[ScoreError, ScoreError, ScoreError], Float64[Tensor, "3 rows"]]:
    """Errors for `out`, the LSE and copies, and `per_dot` of each.

    Of these errors `per_product` counts before a cap, `per_score` for |s| + B, the others as ever.
    """
    is_capped = (soft_cap > 0).to(torch.float64)
    dot, dot_copy = dot_product_error(head_size, arithmetic), dot_copy_error(head_size, arithmetic)
    before = _BEFORE_CAP * FLOAT32_ROUNDOFF * is_capped
    cap = ScoreError(per_score=is_capped * arithmetic.tanh, constant=soft_cap * TANH_ERROR)
    addition = ScoreError(per_score=is_biased * FLOAT32_ROUNDOFF)
    exponent = exponent_error(of_score=_OF_SCORE, of_difference=_OF_DIFFERENCE)
    result = exponent + cap + addition + split_exponent_error(num_tokens.log()) * arithmetic.is_split
    result += declared_exponent_error(scale, arithmetic)
    result += ScoreError(per_product=dot.per_product, per_score=arithmetic.score)
    copy = exponent_error(of_score=_COPY_OF_SCORE, of_difference=_COPY_OF_DIFFERENCE) + cap + addition
    copy += ScoreError(per_product=dot_copy.per_product, per_score=arithmetic.score)
    twice = 2 * arithmetic.copies
    per_dot = (dot.per_score + before, dot.per_score + before, (dot_copy.per_score + before) * twice)
    columns = (torch.as_tensor(each, dtype=torch.float64, device="cpu").expand_as(num_tokens) for each in per_dot)
    return (result, result, copy * twice), torch.stack(list(columns))


def variant_scores(
    dots: Float64[Tensor, "rows group num_tokens"],
    dot_errors: Float64[Tensor, "3 rows group num_tokens"],
    rows: VariantRows,
    units: VariantUnits,
    per_score: Float64[Tensor, "3 rows 1 1"],
    constant: Float64[Tensor, "3 rows 1 1"],
) -> VariantScores:
    """From `dots`, x of every token, and `dot_errors`, the part of their errors that products have.

    A token from the sink on takes the sink's score, and has no error of products.
    """
    errors = torch.addcmul(dot_errors, units.per_dot, dots.abs())
    has_cap = units.soft_cap > 0
    cap = units.soft_cap.where(has_cap, 1.0)
    slope_at_most = 1 - torch.tanh((dots.abs() - errors).clamp(min=0) / cap).square()
    errors = torch.where(has_cap, torch.minimum(errors * slope_at_most, 2 * cap), errors)
    scores = torch.where(has_cap, cap * torch.tanh(dots / cap), dots) + rows.slope * rows.distance
    shift = rows.slope.abs() * units.reach
    scores = torch.where(rows.is_sink, rows.sink, scores)
    errors = errors.masked_fill(rows.is_sink, 0.0)
    errors = torch.addcmul(errors + constant, per_score, scores.abs() + shift)
    return VariantScores(scores, errors.add(shift, alpha=_OF_BIAS * FLOAT32_ROUNDOFF), shift)
