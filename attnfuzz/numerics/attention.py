"""Error bound of decode attention, out = softmax(scale q.k) V with its natural log-sum-exp, for one sequence."""

from dataclasses import replace

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.numerics.bound import Bound, after_rounding
from attnfuzz.numerics.log_sum_exp_error import log_sum_exp_error
from attnfuzz.numerics.perturbed_softmax import perturbed_softmax
from attnfuzz.numerics.score_error import (
    ExponentRoundings,
    count_rescales,
    dot_product_error,
    exponent_error,
    split_exponent_error,
)
from attnfuzz.numerics.units import (
    EXP_ERROR,
    TF32_ROUNDOFF,
    accumulation_roundoff,
    half_smallest_subnormal,
    unit_roundoff,
)
from attnfuzz.numerics.weighted_average import AverageRoundings, denominator_error, weighted_average_error
from attnfuzz.problems.declared_numerics import Numerics

__all__ = ["attention_bound"]

# Keeps a chunk of heads below 32 MiB for each intermediate of shape [heads, seq_len, head_size].
_LARGEST_CHUNK = 2**22

# Softmax does not see an error common to all scores, so rounding the scale, log2(e) and their product (3) acts on
# s_i - max s only; there too: the subtraction, the product with log2(e) and a separately scaled maximum (3). The
# products with scale and log2(e) round each score by itself (2).
_OUT_ROUNDINGS = ExponentRoundings(of_score=2, of_difference=6)

# LSE sees the scale, log2(e), their product and the product with the score (4), and a separately scaled maximum (1,
# on max s = s_i + (max s - s_i)).
_LSE_ROUNDINGS = ExponentRoundings(of_score=5, of_difference=7)


def attention_bound(
    q: Float64[Tensor, "num_q_heads head_size"],
    k: Float64[Tensor, "seq_len num_kv_heads head_size"],
    v: Float64[Tensor, "seq_len num_kv_heads head_size"],
    scale: float | int,
    *,
    in_dtype: torch.dtype,
    out_dtype: torch.dtype,
    numerics: Numerics,
    num_partials: int = 1,
    partial_merge: bool = False,
    truncates_bfloat16: bool = False,
) -> Bound:
    """Largest error of `out` and `lse` that a correct kernel with these numerics can make.

    `q`, `k`, `v` hold the exact inputs of one sequence in token order; query head h reads KV head
    h // (num_q_heads / num_kv_heads). `in_dtype` is their dtype before widening, `out_dtype` that of the result.
    `num_partials`: at most how many partial results a split kernel combines in one step; 1 for none.
    `partial_merge`: the kernel's results are the partials themselves, stored in `out_dtype` with a float32 LSE each and
    combined by the caller in float64: every partial is rounded, the combination is not. The split ranges need not
    be known, since sum_s w_s |o_s| <= sum_i p_i |v_i|.
    `truncates_bfloat16`: conversions to bfloat16 drop bits instead of rounding, as in Triton's interpreter.

    Assumes that no intermediate overflows float32: head_size * max|q k| * |scale| and seq_len * max|v| below 3e38.
    Returns a `Bound` with `out [num_q_heads, head_size]` and `lse [num_q_heads]`, both zero when `seq_len` is 0.
    Raises `ValueError` for `num_partials` < 1, for head counts that do not divide and for an unknown dtype.
    """
    num_q_heads, head_size = q.shape
    seq_len, num_kv_heads, _ = k.shape
    _check(num_q_heads, num_kv_heads, num_partials)
    if seq_len == 0:
        return Bound(out=torch.zeros_like(q), lse=q.new_zeros(num_q_heads))
    kv_heads = torch.arange(num_q_heads, device=q.device) // (num_q_heads // num_kv_heads)
    roundings = _average_roundings(numerics, in_dtype, truncates_bfloat16)
    if num_partials > 1 or partial_merge:
        stored = in_dtype if numerics.partials == "input" else torch.float32
        roundings = _with_partials(roundings, out_dtype if partial_merge else stored, truncates_bfloat16)
    heads_at_once = max(1, _LARGEST_CHUNK // (seq_len * head_size))
    parts = []
    for start in range(0, num_q_heads, heads_at_once):
        heads = slice(start, start + heads_at_once)
        k_part, v_part = (cache[:, kv_heads[heads]].transpose(0, 1) for cache in (k, v))
        dot_error = dot_product_error(q[heads], k_part, scale, in_dtype=in_dtype, numerics=numerics)
        scores = scale * torch.einsum("hd,hnd->hn", q[heads], k_part)
        parts.append(_errors(scores, dot_error, v_part, roundings))
    out, out_error, lse_error = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if not partial_merge:
        truncates = truncates_bfloat16 and out_dtype == torch.bfloat16
        out_error = after_rounding(out_error, out, out_dtype, truncates=truncates)
    return Bound(out=out_error, lse=lse_error)


def _errors(
    scores: Float64[Tensor, "num_heads seq_len"],
    dot_error: Float64[Tensor, "num_heads seq_len"],
    values: Float64[Tensor, "num_heads seq_len head_size"],
    roundings: AverageRoundings,
) -> tuple[
    Float64[Tensor, "num_heads head_size"], Float64[Tensor, "num_heads head_size"], Float64[Tensor, " num_heads"]
]:
    """Exact output, its error before the final rounding, and the error of the LSE."""
    common = dot_error + split_exponent_error(scores) if roundings.is_split else dot_error
    out_score_error = common + exponent_error(scores, _OUT_ROUNDINGS)
    lse_score_error = common + exponent_error(scores, _LSE_ROUNDINGS)
    num_rescales = count_rescales(scores, out_score_error)
    rescale_error = EXP_ERROR * num_rescales
    softmax = perturbed_softmax(scores, out_score_error + rescale_error)
    average = torch.einsum("hn,hnd->hd", softmax.p, values)
    out_error = weighted_average_error(softmax, values, average, num_rescales, roundings)
    sum_error = denominator_error(softmax, num_rescales, roundings.sum_roundoff)
    num_stages = 2 if roundings.is_split else 1
    lse_error = log_sum_exp_error(scores, lse_score_error + rescale_error, sum_error, num_stages=num_stages)
    return average, out_error, lse_error


def _average_roundings(numerics: Numerics, in_dtype: torch.dtype, truncates_bfloat16: bool) -> AverageRoundings:
    weight_roundoff = weight_absolute = value_roundoff = 0.0
    if numerics.probabilities == "input" and in_dtype != torch.float32:
        truncates = truncates_bfloat16 and in_dtype == torch.bfloat16
        weight_roundoff = unit_roundoff(in_dtype, truncates=truncates)
        weight_absolute = half_smallest_subnormal(in_dtype) * (1 + int(truncates))
    if numerics.matmul == "tf32":
        weight_roundoff = max(weight_roundoff, TF32_ROUNDOFF)
        value_roundoff = TF32_ROUNDOFF if in_dtype == torch.float32 else 0.0
    return AverageRoundings(
        sum_roundoff=accumulation_roundoff(numerics),
        weight_roundoff=weight_roundoff,
        weight_absolute=weight_absolute,
        value_roundoff=value_roundoff,
    )


def _with_partials(roundings: AverageRoundings, stored_as: torch.dtype, truncates_bfloat16: bool) -> AverageRoundings:
    truncates = truncates_bfloat16 and stored_as == torch.bfloat16
    return replace(
        roundings,
        is_split=True,
        partial_roundoff=unit_roundoff(stored_as, truncates=truncates),
        partial_absolute=half_smallest_subnormal(stored_as) * (1 + int(truncates)),
    )


def _check(num_q_heads: int, num_kv_heads: int, num_partials: int) -> None:
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads={num_q_heads!r} must be a multiple of num_kv_heads={num_kv_heads!r}; "
            "give every KV head the same number of query heads"
        )
    if num_partials < 1:
        raise ValueError(f"num_partials={num_partials!r} must be at least 1; use 1 for a kernel that does not split")
