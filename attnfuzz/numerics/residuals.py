"""How large the errors of a correct kernel are together: what no single element shows, because each is in its bound.

A bound is the worst case of roundings that all go the same way. Over many elements they do not, so an error more, or
one that leans to one side, shows in the mean long before an element leaves its bound. Here an error is taken apart:

* roundings to 16 bits (weights, partial results, the output), each up to half a unit in the last place either way. Of
  drawn numbers with every bit of their dtype they err uniformly and independently of each other, so that their sum has
  the sum of their variances h^2 / 3 (Higham and Mary, A new approach to probabilistic rounding error analysis, SIAM J.
  Sci. Comput. 41, 2019), and is sub-Gaussian with that for a proxy, as a uniform variable is with its own variance;
* what float32 adds, whose size is known and whose direction is not: scores and exponentials (an error of each weight),
  additions, which tensor cores always truncate. It does not depend on the signs of V, which are drawn by tossing coins:
  sum_i p_i e_i v_i is sub-Gaussian with the proxy sum_i p_i^2 e_i^2 v_i^2, and a partial sum of p_i v_i with what is at
  most s^2 = sum_i p_i^2 v_i^2, however the kernel orders its tokens.

With S the root of the first kind's proxy, D the sum of the roots of the second kind's and r = S / (S + D), convexity
gives

    (error / (S + D))^2 <= r a + (1 - r) b

where E exp(t a / 2) <= 1 / sqrt(1 - t) for 0 <= t < 1, and likewise for b (Wainwright, High-Dimensional Statistics,
Theorem 2.6). The same holds for the mean of a over the elements of one row, however they depend on each other; the a of
n rows are independent. The b are so even within a row, since each element has a V of its own, but for rows that share
it, at most g of them. So by Chernoff, with R the sum of the mean r of each row, and W that of all 1 - r,

    P(sum r a >= R (1 + x)) <= exp(-R (x - log(1 + x)) / 2)
    P(sum (1 - r) b >= W (1 + y)) <= exp(-W (y - log(1 + y)) / 2 g)

Likewise the mean of error / (S + D), signs kept, is at most sqrt(2 L Q / n) + sqrt(T (1 + z)), where Q and T are the
means of r^2 and of (1 - r)^2, but for a probability of exp(-L) for each part. `_NATS` is L. Of a log-sum-exp, which
knows no V, D is a bound: there b is at most 1.

A sum of weights that is wrong moves all elements of a row by one *factor*, which in each of them is no larger than
its roundings. The factor of a row is w . error with w = out / |out|^2. Roundings of weight i move it by p_i (w . v_i),
or by p_i (w . v_i - 1) if they are summed as well, and those of single elements hardly: so its S is several times
smaller than an element's. Its D is a bound, b at most 1, for what each weight errs by, and for products. A partial sum,
however the kernel orders its tokens, is a vector whose squared norm exceeds sum_d s_d^2 by no more than `_most` says,
but for a probability of exp(-L); additions err by that, times |w|, and by as much of the sum of weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from attnfuzz.numerics.arithmetic import (
    EXP_ERROR,
    FLOAT32_ROUNDOFF,
    LOG_ERROR,
    SMALLEST_NORMAL_FLOAT32,
    Arithmetic,
    side_by_side,
)
from attnfuzz.numerics.row_units import RowUnits, attention_units

_NATS = 32.0
"""exp(-32) is 1.3e-14: with two such parts of each of four questions, one case in 10^13 is accused by chance."""

_HEAVIEST = 0.9
"""A row whose weight is nearly all on one token returns that token's V, which is rounded back to itself: such roundings
lean outwards, and the weight of 1 has none."""

_BESIDE_THE_HEAVIEST = 0.05
"""Weights within two roundoffs of the largest are rounded up to it, and not either way: they may have this much."""

_PER_PRODUCT = 20 * FLOAT32_ROUNDOFF
"""On every p_i v_i, and on the result: see `row_units`."""

_LATER_MAXIMA = 5
"""Keys are drawn alike, so the k-th token has the largest score so far with probability 1 / k: the running maximum
rises log n times on average. Five times (1 + log n) are exceeded with a probability below 1e-9 from n = 16 on."""


@dataclass(frozen=True)
class Spread:
    """The spread that errors of query tokens' results may have together.

    `out`, `lse`, `factor`: S + D; `out_fixed`, `lse_fixed`, `factor_fixed`: D alone. `is_telling`: heads whose
    roundings go either way.
    """

    out: Float64[Tensor, "rows num_q_heads v_head_size"]
    out_fixed: Float64[Tensor, "rows num_q_heads v_head_size"]
    lse: Float64[Tensor, "rows num_q_heads"]
    lse_fixed: Float64[Tensor, "rows num_q_heads"]
    factor: Float64[Tensor, "rows num_q_heads"]
    factor_fixed: Float64[Tensor, "rows num_q_heads"]
    is_telling: Bool[Tensor, "rows num_q_heads"]


def spread_of_rows(
    q: Float64[Tensor, "rows num_q_heads head_size"],
    k: Float64[Tensor, "rows num_tokens num_kv_heads head_size"],
    v: Float64[Tensor, "rows num_tokens num_kv_heads v_head_size"],
    scale: float,
    arithmetic: Arithmetic,
    *,
    smallest_exponent: int,
) -> Spread:
    """How far residuals spread in attention of query tokens, each to as many tokens, at least one, without variants and
    without an 8-bit cache.

    K is drawn alike for all tokens, V by tossing coins for its signs; `smallest_exponent`: of a normal number in the
    output's dtype.
    """
    num_rows, num_tokens, num_kv_heads, head_size = k.shape
    sizes = torch.tensor([[scale], [head_size], [num_tokens]], dtype=torch.float64, device="cpu")
    columns = attention_units(side_by_side([arithmetic]), scale=sizes[0], head_size=sizes[1], num_tokens=sizes[2])
    units = RowUnits.of_columns(columns)
    arithmetic = arithmetic.of_rows(torch.tensor(float(num_tokens), dtype=torch.float64, device="cpu"))
    queries, keys, values = q.view(num_rows, num_kv_heads, -1, head_size), k.transpose(1, 2), v.transpose(1, 2)
    scores = scale * (queries @ keys.mT)
    products = (queries.abs() + units.query_floor) @ (keys.abs() + units.key_floor).mT
    distance = scores.amax(-1, keepdim=True) - scores
    p = scores.softmax(-1)
    heaviest = p.amax(-1, keepdim=True)
    of_out, of_lse, of_copies = (
        units.score_product[i] * products
        + units.per_score[i] * scores.abs()
        + units.per_distance[i] * distance
        + units.score_constant[i]
        for i in range(3)
    )
    rescales = (EXP_ERROR + FLOAT32_ROUNDOFF) * _LATER_MAXIMA * (1 + math.log(num_tokens))
    additions = units.denominator_sum
    out = p @ values
    square, weighted = values.square(), p.square()
    each = torch.maximum(units.weight * p, units.weight_absolute * heaviest).square()

    on_weights = (of_out + of_copies).expm1() + rescales
    moved = weighted * on_weights.square()
    of_scores = moved @ square + 2 * out.abs() * (moved @ values.abs()) + out.square() * moved.sum(-1, keepdim=True)
    of_sums = (weighted @ square).sqrt()
    lse = scores.logsumexp(-1, keepdim=True)
    logarithm = units.logarithm + units.lse * lse.abs()
    fixed = of_scores.sqrt() + additions * (of_sums + out.abs()) + _PER_PRODUCT * (p @ values.abs() + out.abs())
    fixed = fixed + units.by_lse * logarithm * out.abs()
    of_values = each @ square
    of_deviations = of_values - 2 * out * (each @ values) + out.square() * each.sum(-1, keepdim=True)
    half_ulp = units.stored * (out.abs() * (1 + 2.0**-6)).clamp(min=2.0**smallest_exponent).log2().floor().exp2()
    partial = ((arithmetic.tile + arithmetic.partial) * of_sums + arithmetic.partial_absolute).square()
    varying = ((torch.maximum(of_values, of_deviations) + half_ulp.square()) / 3 + partial).sqrt()

    towards = out / out.square().sum(-1, keepdim=True).clamp(min=SMALLEST_NORMAL_FLOAT32)
    of_each = towards @ values.mT
    of_rounded = (each * torch.maximum(of_each.abs(), (of_each - 1).abs()).square()).sum(-1)
    of_elements = (towards.square() * (half_ulp.square() / 3 + partial)).sum(-1)
    size = values.shape[-1]
    norm = (of_sums.square().sum(-1) * _most(float(size)) / size).sqrt() * towards.square().sum(-1).sqrt()
    products_of_values = (towards.abs() * (p @ values.abs() + out.abs())).sum(-1)
    factor_fixed = (
        (p * on_weights * (of_each.abs() + 1)).sum(-1)
        + additions * (norm + 1)
        + _PER_PRODUCT * products_of_values
        + (units.by_lse * logarithm).squeeze(-1)
    )
    factor = (of_rounded / 3 + of_elements).sqrt() + factor_fixed

    lse_fixed = (p * of_lse).sum(-1, keepdim=True) + rescales + additions
    lse_fixed = lse_fixed + logarithm + LOG_ERROR
    of_rounded_sum = units.sums_rounded * (each.sum(-1, keepdim=True) - each.amax(-1, keepdim=True)).clamp(min=0) / 3
    beside = torch.where(distance < 2 * units.weight, p, 0.0).sum(-1, keepdim=True) - heaviest
    return Spread(
        out=(varying + fixed).flatten(1, 2),
        out_fixed=fixed.flatten(1, 2),
        lse=(of_rounded_sum.sqrt() + lse_fixed).flatten(1),
        lse_fixed=lse_fixed.flatten(1),
        factor=factor.flatten(1),
        factor_fixed=factor_fixed.flatten(1),
        is_telling=((heaviest < _HEAVIEST) & (beside < _BESIDE_THE_HEAVIEST)).flatten(1),
    )


@dataclass(frozen=True)
class Residuals:
    """Errors of many rows over what each may be: `size`, the root of their mean square, and `lean`, their mean.

    `largest_size`, `largest_lean`: what these exceed by chance once in 10^13 kernels.
    """

    num_rows: int
    size: float
    lean: float
    largest_size: float
    largest_lean: float

    @property
    def excess(self) -> float:
        """The size over the largest one that chance explains."""
        return self.size / self.largest_size

    @property
    def is_too_large(self) -> bool:
        """Whether there is more of an error than all roundings make."""
        return self.excess > 1

    @property
    def is_one_sided(self) -> bool:
        """Whether they go the same way too often."""
        return abs(self.lean) > self.largest_lean


def residuals(
    errors: Float64[Tensor, "rows elements"],
    spread: Float64[Tensor, "rows elements"],
    fixed: Float64[Tensor, "rows elements"],
    *,
    most_sharing: int,
) -> Residuals:
    """Sum up the errors of at least one row; at most `most_sharing` of them read the same V, or 0 without V.

    `errors` are positive away from what `lean` is about; `spread` and `fixed` as in `Spread`.
    """
    num_rows = len(errors)
    relative, of_fixed = errors / spread, fixed / spread
    varying = float((1 - of_fixed).mean()) * num_rows
    square = float((1 - of_fixed).square().mean())
    return Residuals(
        num_rows=num_rows,
        size=float(relative.square().mean().sqrt()),
        lean=float(relative.mean()),
        largest_size=math.sqrt(
            (_most(varying) + _most(float(of_fixed.sum()), most_sharing) / errors.shape[1]) / num_rows
        ),
        largest_lean=math.sqrt(2 * _NATS * square / num_rows)
        + math.sqrt(_most(float(of_fixed.square().sum()), most_sharing) / errors.numel()),
    )


def _most(total: float, most_sharing: int = 1) -> float:
    """The `total` (1 + x) that is exceeded once in exp(`_NATS`), where so many terms may be the same; 0 if none varies.

    x - log(1 + x) grows with x, and is at least x / 2 - 1, which gives an end for bisection.
    """
    if total <= 0 or most_sharing == 0:
        return total
    wanted = 2 * _NATS * most_sharing / total
    low, high = 0.0, 2 * wanted + 4
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if middle - math.log1p(middle) < wanted else (low, middle)
    return total * (1 + high)
