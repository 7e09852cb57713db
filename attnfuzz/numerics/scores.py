"""How wrong a kernel's scores, and the exponents made from them, can be; those with a soft cap, ALiBi or a sink too.

Counts of roundings are upper bounds over the ways kernels are written: scale before or after the dot product, natural
or base-2 exponentials, log2(e) folded into the scale or not, the maximum scaled separately. They are given in units of
u = 2^-24 and cover the product terms to first order; what is dropped is smaller by a factor of u.

With x = scale q.k, a score with variants is s = c tanh(x / c), or x + m (t - p) for a slope m and a key t - p tokens
from the query's own position. A sink is one more token, whose score is given and whose value is 0. A window only leaves
tokens out.

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
  (`attnfuzz.trials.expected_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from attnfuzz.numerics.arithmetic import EXP_ERROR, FLOAT32_ROUNDOFF, LOG_ERROR, TANH_ERROR, Arithmetic, Number, gamma

# Scaling q before the product (2: scale times log2(e), times q) and the product itself (1) act on every |q_d k_d|.
_ROUNDINGS_PER_PRODUCT = 3

_TINY = 1e-100
"""Where numbers lie no further apart, any number of them fit in."""


@dataclass(frozen=True)
class ScoreError:
    """An error of the exponent of token i, as a sum of what it is proportional to.

    `per_product * |scale| sum_d |q_d k_d| + per_score * |s_i| + per_distance * (max s - s_i) + constant`
    """

    per_product: Number = 0.0
    per_score: Number = 0.0
    per_distance: Number = 0.0
    constant: Number = 0.0

    def __add__(self, other: ScoreError) -> ScoreError:
        return ScoreError(
            per_product=self.per_product + other.per_product,
            per_score=self.per_score + other.per_score,
            per_distance=self.per_distance + other.per_distance,
            constant=self.constant + other.constant,
        )

    def __mul__(self, factor: Number) -> ScoreError:
        return ScoreError(
            per_product=self.per_product * factor,
            per_score=self.per_score * factor,
            per_distance=self.per_distance * factor,
            constant=self.constant * factor,
        )


def dot_product_error(head_size: Number, arithmetic: Arithmetic) -> ScoreError:
    """Largest error of `scale * q.k_i` from the products and their sum.

    Summing head_size products in any order errs by gamma_head_size times the largest partial sum. Every partial sum
    is a sum over a subset, so it is at most the larger of the sum P of the positive products and the sum N of the
    others' magnitudes; this is up to twice as sharp as the usual A = sum of all |q_d k_d| (Higham §3.1, §4.2). With
    P + N = A and scale (P - N) = s it is |scale| max(P, N) = (|scale| A + |s|) / 2. The roundings of single products
    and of their operands count against A, that of its product with a scale of K against |s|.
    """
    half = gamma(head_size, arithmetic.addition) / 2
    every_product = _ROUNDINGS_PER_PRODUCT * arithmetic.addition + arithmetic.operand
    return ScoreError(per_product=half + every_product, per_score=half + arithmetic.score)


def exponent_error(*, of_score: int, of_difference: int) -> ScoreError:
    """Largest error, in the exponent, of exp(s_i - max s) for correctly rounded scores.

    The number of roundings of s_i and of s_i - max s, and that of exp itself.
    """
    return ScoreError(
        per_score=of_score * FLOAT32_ROUNDOFF, per_distance=of_difference * FLOAT32_ROUNDOFF, constant=EXP_ERROR
    )


def declared_exponent_error(scale: Float64[Tensor, " rows"], arithmetic: Arithmetic) -> ScoreError:
    """The error that a kernel declares of its exponentials, and of scores stored before and after they are scaled."""
    of_small_scores = (1 + scale.abs()) * arithmetic.score_absolute
    return ScoreError(per_distance=arithmetic.exponent, constant=arithmetic.exponential + of_small_scores)


def score_copies_error(head_size: Number, log_num_tokens: Number, arithmetic: Arithmetic) -> ScoreError:
    """Largest difference between the exponent of a weight in the numerator and that of the same in the denominator.

    Of scores that threads rounded differently and, where the numerator may have exponentials of its own, of these
    (`normaliser_error`).

    A score that several threads need is summed in all of them at once: each adds to its part what another one holds,
    and the other way round (a butterfly of shuffles). Where a part is a single product, compilers fuse it with the
    addition, `fma(q_d, k_d, other)`, so that each thread rounds the other's product and not its own, and copies of
    the score differ. With Triton 3.6 on an H100 a weight then came out 24u larger in the numerator than in the
    denominator, which takes one thread's copy (16 float32 dimensions in 16 lanes; `fma.rn` after `shfl.sync.bfly`).

    So this is about sums of one product per thread, whose additions form a tree of log2(head_size) levels. Each copy
    errs by the rounding of its products, that of the tree (the partial sums as in `dot_product_error`), and what
    comes after: the score's product with scale and with log2(e), its difference from the maximum, which may be scaled
    separately, and exp. The constants' own roundings are common to both.

    On a CPU there is one copy. Triton's interpreter keeps each tensor once, and so does eager torch: whatever order its
    matrix product sums in, the score is written to memory, and the maximum, the sum and the weights read it there.
    Torch's own fused attention on CPUs does likewise, tile by tile.
    """
    one = dot_copy_error(head_size, arithmetic) + _copy_exponent_error(arithmetic)
    return one * (2 * arithmetic.copies) + normaliser_error(log_num_tokens, arithmetic)


def _copy_exponent_error(arithmetic: Arithmetic) -> ScoreError:
    """The error after a score is summed, for one copy; 0 where `normaliser_error` has it for both."""
    return exponent_error(of_score=2, of_difference=3) * (1 - arithmetic.by_lse)


def dot_copy_error(head_size: Number, arithmetic: Arithmetic) -> ScoreError:
    """The part of `score_copies_error` that one copy has from products and their sum."""
    head_size = torch.as_tensor(head_size, dtype=torch.float64, device="cpu")
    half = gamma(head_size.log2().ceil(), arithmetic.addition) / 2
    return ScoreError(per_product=half + arithmetic.addition, per_score=half + arithmetic.score)


def normaliser_error(log_num_tokens: Number, arithmetic: Arithmetic) -> ScoreError:
    """The most by which a weight exp(s_i - lse) of the numerator differs from those that the float32 lse has summed.

    Nothing divides by the sum then, so that no error of exponents is common to both: FlashAttention 2 combines splits
    with the weights exp(lse_s - lse) (`combine_attn_seqk_parallel`), vLLM the ranks of its decode context parallelism,
    and a kernel of two passes may weigh its tokens with exp(s_i - lse). The lse's own error counts against the
    denominator (`logarithm_error`). Here are the roundings that exponents have apart from each other:

    - in the sum, exp(s_i - max s): the score's products with scale and log2(e) (2, on |s_i|), the difference, its
      product with log2(e) and that constant, or its product with the scale (3, on max s - s_i), and exp. A maximum that
      is scaled separately is off by as much for all tokens, which is one of the three units of the logarithm;
    - in the numerator as many, where the difference is |s_i - lse| <= (max s - s_i) + log n; and those of lse to base 2
      and of that constant (2, on |lse| <= |s_i| + (max s - s_i) + log n).

    Where splits are combined there are as many with an lse_s in place of s_i, |lse_s| <= |s_i| + (max s - s_i) + log n;
    and a split that weighs its own tokens so has the error of lse_s in its output besides (`split_exponent_error`).

    All of it only where a kernel may combine states (`Arithmetic.by_lse`): one that makes no parts divides by the sum.
    """
    logarithm = FLOAT32_ROUNDOFF * log_num_tokens
    of_tokens = _per_exponent(of_score=6, of_difference=8, constant=5 * logarithm)
    of_states = _per_exponent(of_score=6, of_difference=12, constant=12 * logarithm)
    of_states += split_exponent_error(log_num_tokens)
    return (of_tokens + of_states * arithmetic.is_split) * arithmetic.by_lse


def _per_exponent(*, of_score: int, of_difference: int, constant: Number) -> ScoreError:
    """The error of two exponents, each with an exp of its own."""
    error = exponent_error(of_score=of_score, of_difference=of_difference)
    return error + ScoreError(constant=EXP_ERROR + constant)


def split_exponent_error(log_num_tokens: Number) -> ScoreError:
    """The error of a token's weight when its split is weighted by exp(lse_split - lse), lse_split kept in float32.

    |lse_split| <= |s_i| + |s_i - max s| + log n, and it is rounded up to five times: the sum max + log(l), to natural
    logarithms for storing (2) and back to base 2 (2). Then one subtraction and two roundings of the exponent's base
    (3, on |lse_split - lse| <= |s_i - max s| + log n), one log and one more exp.
    """
    logarithm = 8 * FLOAT32_ROUNDOFF * log_num_tokens + LOG_ERROR * (1 + log_num_tokens)
    return exponent_error(of_score=5, of_difference=8) + ScoreError(constant=logarithm)


def count_rescales(
    log_p: Float64[Tensor, "*rows num_tokens"],
    lse: Float64[Tensor, "*rows 1"],
    moves: Float64[Tensor, "*rows num_tokens"],
    present: Float64[Tensor, "*#rows num_tokens"],
    shift: Float64[Tensor, "*#rows 1"] | None = None,
) -> Float64[Tensor, "*rows num_tokens"]:
    """At most how often online softmax multiplies an accumulator holding token i by a factor other than exp(0) = 1.

    That happens when a tile, split or merge brings a maximum above the running one, which is at least s_i. Each time
    it is another token's score, larger than s_i. So the number of tokens that can exceed s_i, given by how much each
    score `moves`, is a limit for every tile size and order. Heavy tokens have few above them.

    Each time the maximum is another float32 number, too, between the lowest that s_i can be and the highest that any
    score can be. If a is the one of these two that is nearer to 0, float32 numbers between them lie at least
    u (|a| - `shift`) apart, in whatever unit a kernel has its scores, and if it shifts them all by up to `shift`: no
    more fit in. That is what limits equal scores. Their number alone would count, since different products are rounded
    differently: a kernel that takes token by token may meet equal scores in the order in which they come out, and then
    rescales at each. How far exp of a tiny number is from 1 no manual tells, beyond its relative error.

    The scores are `log_p` + `lse`. Tokens that are not `present` (0.0, else 1.0) have a log_p of -inf: they exceed
    none, and count 0.
    """
    lowest = log_p - moves
    ceilings, _ = (log_p + moves).sort(-1)
    highest = ceilings[..., -1:]
    nearest = torch.maximum(lowest + lse, -lse - highest)
    if shift is not None:
        nearest = nearest - shift
    in_float32 = (highest - lowest) / nearest.mul(FLOAT32_ROUNDOFF).clamp_(min=_TINY)
    above = log_p.shape[-1] - 1 - torch.searchsorted(ceilings, lowest, right=True)
    return torch.minimum(above, in_float32).clamp_(min=0.0).mul_(present)


_BEFORE_CAP = 7
_OF_SCORE, _OF_DIFFERENCE = 5, 7  # as for the LSE of plain attention
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
        """The fields as one tensor, in their order."""
        return cls(columns[:3], *columns[3:].unbind())

    def __getitem__(self, rows: slice) -> VariantUnits:
        return VariantUnits(*(getattr(self, field.name)[..., rows, :, :] for field in fields(self)))


@dataclass(frozen=True)
class VariantRows:
    """The variants of some rows. `slope`, `sink`: of each query head, 0 where there is none.

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
        num_kv_heads: int,
        num_q_heads: int,
        num_keys: Sequence[int],
        num_tokens: int,
        device: torch.device,
    ) -> VariantRows:
        """The rows of the KV heads of some queries, each of which is its own last key; padded to ``num_tokens``."""
        none = torch.zeros(num_q_heads, dtype=torch.float64, device=device)
        heads = [none if of is None else of for of in (alibi_slopes, sinks)]
        slope, sink = (of.expand(len(num_keys), -1).reshape(len(num_keys) * num_kv_heads, -1, 1) for of in heads)
        own = torch.tensor(num_keys, dtype=torch.int64, device=device).repeat_interleave(num_kv_heads)[:, None, None]
        position = torch.arange(num_tokens, device=device)
        distance = (position - (own - 1)).clamp(max=0).to(torch.float64)
        return cls(slope=slope, sink=sink, distance=distance, is_sink=position >= own)

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
    copy = _copy_exponent_error(arithmetic) + cap + addition
    copy += ScoreError(per_product=dot_copy.per_product, per_score=arithmetic.score)
    twice = 2 * arithmetic.copies
    copies = copy * twice + normaliser_error(num_tokens.log(), arithmetic)
    per_dot = (dot.per_score + before, dot.per_score + before, (dot_copy.per_score + before) * twice)
    columns = (torch.as_tensor(each, dtype=torch.float64, device="cpu").expand_as(num_tokens) for each in per_dot)
    return (result, result, copies), torch.stack(list(columns))


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
