"""How wrong a kernel's scores, and the exponents made from them, can be.

Counts of roundings are upper bounds over the ways kernels are written: scale before or after the dot product, natural
or base-2 exponentials, log2(e) folded into the scale or not, the maximum scaled separately. They are given in units of
u = 2^-24 and cover the product terms to first order; what is dropped is smaller by a factor of u.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.numerics.units import (
    EXP_ERROR,
    FLOAT32_ROUNDOFF,
    LOG_ERROR,
    TF32_ROUNDOFF,
    accumulation_roundoff,
    gamma,
)
from attnfuzz.problems.declared_numerics import Numerics

__all__ = ["ExponentRoundings", "count_rescales", "dot_product_error", "exponent_error", "split_exponent_error"]

# Scaling q before the product (2: scale times log2(e), times q), the product itself (1), and the parts that TF32x3
# leaves out (1): each acts on every |q_d k_d|.
_ROUNDINGS_PER_PRODUCT = 4


@dataclass(frozen=True)
class ExponentRoundings:
    """Roundings of s - max s, in units of u: `of_score` times |s_i| and `of_difference` times |s_i - max s|."""

    of_score: int
    of_difference: int


def dot_product_error(
    q: Float64[Tensor, "num_heads head_size"],
    k: Float64[Tensor, "num_heads num_tokens head_size"],
    scale: float | int,
    *,
    in_dtype: torch.dtype,
    numerics: Numerics,
) -> Float64[Tensor, "num_heads num_tokens"]:
    """Largest error of `scale * q.k_i` from the products and their sum.

    Summing head_size products in any order errs by gamma_head_size times the largest partial sum. Every partial sum
    is a sum over a subset, so it is at most M = max(sum of positive products, sum of |negative products|); this
    is up to twice as sharp as the usual sum of all |q_d k_d| = A (Higham §3.1, §4.2). The roundings of single products
    count against A. TF32 changes both float32 operands by t = 2^-10 each: (2t + t^2) A. Float16 and bfloat16
    operands are exact in TF32.
    """
    head_size = q.shape[-1]
    roundoff = accumulation_roundoff(numerics)
    above, below = _sums_by_sign(q, k)
    all_magnitudes = above + below
    error = gamma(head_size, roundoff) * torch.maximum(above, below)
    error += _ROUNDINGS_PER_PRODUCT * roundoff * all_magnitudes
    if numerics.matmul == "tf32" and in_dtype == torch.float32:
        error += (2 * TF32_ROUNDOFF + TF32_ROUNDOFF**2) * all_magnitudes
    return abs(scale) * error


def exponent_error(
    scores: Float64[Tensor, "rows num_tokens"], roundings: ExponentRoundings
) -> Float64[Tensor, "rows num_tokens"]:
    """Largest error, in the exponent, of exp(s_i - max s) for correctly rounded scores. A score of -inf has none."""
    distance = (scores.amax(-1, keepdim=True) - scores).where(scores.isfinite(), 0.0)
    magnitude = scores.abs().where(scores.isfinite(), 0.0)
    relative = roundings.of_score * magnitude + roundings.of_difference * distance
    return FLOAT32_ROUNDOFF * relative + EXP_ERROR


def split_exponent_error(scores: Float64[Tensor, "rows num_tokens"]) -> Float64[Tensor, "rows num_tokens"]:
    """What a token's weight loses when its split is weighted by exp(lse_split - lse), lse_split kept in float32.

    |lse_split| <= |s_i| + |s_i - max s| + log n, and it is rounded up to five times: the sum max + log(l), to natural
    logarithms for storing (2) and back to base 2 (2). Then one subtraction and two roundings of the exponent's base
    (3, on |lse_split - lse| <= |s_i - max s| + log n), one log and one more exp.
    """
    log_num_tokens = math.log(scores.shape[-1])
    error = exponent_error(scores, ExponentRoundings(of_score=5, of_difference=8))
    return error + 8 * FLOAT32_ROUNDOFF * log_num_tokens + LOG_ERROR * (1 + log_num_tokens)


def count_rescales(
    scores: Float64[Tensor, "rows num_tokens"], score_error: Float64[Tensor, "rows num_tokens"]
) -> Float64[Tensor, "rows num_tokens"]:
    """At most how often online softmax multiplies an accumulator holding token i by a factor other than exp(0) = 1.

    That happens when a tile, split or merge brings a maximum above the running one, which is at least s_i. Each time
    it is another token's score, larger than s_i. So the number of tokens that can exceed s_i, given both errors, is a
    limit for every tile size and order. Heavy tokens have few above them.
    """
    ceilings, _ = (scores + score_error).sort(-1)
    not_above = torch.searchsorted(ceilings.contiguous(), (scores - score_error).contiguous(), right=True)
    return (scores.shape[-1] - 1 - not_above).to(torch.float64).clamp(min=0)


def _sums_by_sign(
    q: Float64[Tensor, "num_heads head_size"], k: Float64[Tensor, "num_heads num_tokens head_size"]
) -> tuple[Float64[Tensor, "num_heads num_tokens"], Float64[Tensor, "num_heads num_tokens"]]:
    signed = torch.einsum("hd,hnd->hn", q, k)
    magnitudes = torch.einsum("hd,hnd->hn", q.abs(), k.abs())
    return ((magnitudes + signed) / 2).clamp(min=0), ((magnitudes - signed) / 2).clamp(min=0)
