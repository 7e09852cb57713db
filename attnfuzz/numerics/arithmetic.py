"""From what a kernel declares to the unit of each rounding it may make."""

from functools import lru_cache
from typing import NamedTuple

import torch

from attnfuzz.numerics.units import (
    APPROXIMATE_TANH_ERROR,
    FLOAT32_ROUNDOFF,
    TF32_ROUNDOFF,
    Number,
    accumulation_roundoff,
    half_smallest_subnormal,
    unit_roundoff,
)
from attnfuzz.problems.declared_numerics import Numerics

__all__ = ["Arithmetic", "attention_arithmetic", "merge_arithmetic", "side_by_side"]


class Arithmetic(NamedTuple):
    """Units of roundings, relative unless they are called absolute; an absolute one counts for the smallest numbers.

    `addition`: of a partial sum. `operand`: of every product q_d k_d, because its operands were rounded. `copies`: 1.0
    if threads may hold copies of a score that were rounded differently, else 0.0 (`score_copies_error`). `score`: of
    each score and of each copy of it, by a product with a scale of K. `weight`, `weight_absolute`: of the softmax
    weights before they multiply V. `value`: of V itself. `partial`,
    `partial_absolute`: of stored partial results, where the average `is_split` (1.0, else 0.0). `stored`,
    `stored_absolute`: of the result. `tanh`: of that of a soft cap, beyond `TANH_ERROR`.
    """

    addition: Number = FLOAT32_ROUNDOFF
    operand: Number = 0.0
    copies: Number = 0.0
    score: Number = 0.0
    weight: Number = 0.0
    weight_absolute: Number = 0.0
    value: Number = 0.0
    is_split: Number = 0.0
    partial: Number = 0.0
    partial_absolute: Number = 0.0
    stored: Number = 0.0
    stored_absolute: Number = 0.0
    tanh: Number = 0.0


def side_by_side(rows: list[Arithmetic]) -> Arithmetic:
    """The same for many rows: float64 tensors on the CPU."""
    return Arithmetic(*torch.tensor(rows, dtype=torch.float64, device="cpu").unbind(1))


@lru_cache(maxsize=256)
def attention_arithmetic(
    numerics: Numerics,
    *,
    in_dtype: torch.dtype,
    out_dtype: torch.dtype,
    is_split: bool,
    partial_merge: bool,
    interpreted: bool,
    smallest_kv: tuple[float, float] | None = None,
) -> Arithmetic:
    """Units of decode attention; arguments as those of `attention_bound`.

    TF32 changes both float32 operands of a product by t = 2^-10 each: 2t + t^2. Float16 and bfloat16 operands are exact
    in TF32, which numbers of an 8-bit cache times a scale are not.

    With an 8-bit cache, its numbers are exact in every dtype, and a scale s of K is multiplied in with

    * k: fl(s k), one rounding of each product (u);
    * or the score: fl(s x), one of each score and of each copy of it, and if s was multiplied with `scale` before, one
      more (u), which counts like that of a product, of which no sum is smaller than the score.

    Both are allowed for. A scale of V has one rounding in s v, p s or s o, or two where it is multiplied with 1 / sum
    first; each counts against sum_i p_i |v_i|. A kernel that keeps s k and s v in the input dtype rounds them again, by
    r = max(u_in, eta / m), where eta is half the smallest subnormal number and m the smallest that s k or s v can be
    other than 0, which has no error: then |fl(x) - x| <= max(u_in |x|, eta) <= r |x|.

    Raises `ValueError` for an unknown dtype.
    """
    is_tf32 = numerics.matmul == "tf32" and (in_dtype == torch.float32 or smallest_kv is not None)
    weight = weight_absolute = 0.0
    if numerics.probabilities == "input" and in_dtype != torch.float32:
        weight, weight_absolute = _rounding_to(in_dtype, interpreted)
    arithmetic = Arithmetic(
        addition=accumulation_roundoff(numerics),
        operand=2 * TF32_ROUNDOFF + TF32_ROUNDOFF**2 if is_tf32 else 0.0,
        copies=0.0 if interpreted else 1.0,
        weight=max(weight, TF32_ROUNDOFF) if numerics.matmul == "tf32" else weight,
        weight_absolute=weight_absolute,
        value=TF32_ROUNDOFF if is_tf32 else 0.0,
        tanh=APPROXIMATE_TANH_ERROR if numerics.tanh == "approximate" else 0.0,
    )
    if smallest_kv is not None:
        of_k, of_v = (_dequantising(numerics, in_dtype, smallest, interpreted) for smallest in smallest_kv)
        arithmetic = arithmetic._replace(
            operand=arithmetic.operand + of_k,
            score=FLOAT32_ROUNDOFF,
            value=arithmetic.value + FLOAT32_ROUNDOFF + of_v,
        )
    stored, stored_absolute = _rounding_to(out_dtype, interpreted)
    if partial_merge:
        return arithmetic._replace(is_split=1.0, partial=stored, partial_absolute=stored_absolute)
    if is_split:
        partials = in_dtype if numerics.partials == "input" else torch.float32
        partial, partial_absolute = _rounding_to(partials, interpreted)
        arithmetic = arithmetic._replace(is_split=1.0, partial=partial, partial_absolute=partial_absolute)
    return arithmetic._replace(stored=stored, stored_absolute=stored_absolute)


@lru_cache(maxsize=256)
def merge_arithmetic(out_dtype: torch.dtype, *, interpreted: bool) -> Arithmetic:
    """Units of a merge in float32 that stores its output in `out_dtype`. Raises `ValueError` for an unknown dtype."""
    stored, stored_absolute = _rounding_to(out_dtype, interpreted)
    return Arithmetic(stored=stored, stored_absolute=stored_absolute)


def _dequantising(numerics: Numerics, in_dtype: torch.dtype, smallest: float, interpreted: bool) -> float:
    """Of a number of the cache times its scale."""
    if numerics.dequantised == "float32" or in_dtype == torch.float32:
        return FLOAT32_ROUNDOFF
    relative, absolute = _rounding_to(in_dtype, interpreted)
    return (1 + FLOAT32_ROUNDOFF) * (1 + max(relative, absolute / smallest)) - 1


def _rounding_to(dtype: torch.dtype, interpreted: bool) -> tuple[float, float]:
    truncates = interpreted and dtype == torch.bfloat16
    return unit_roundoff(dtype, truncates=truncates), half_smallest_subnormal(dtype) * (1 + int(truncates))
