"""From what a kernel declares to the unit of each rounding it may make."""

from functools import lru_cache
from typing import NamedTuple

import torch

from attnfuzz.numerics.units import (
    APPROXIMATE_TANH_ERROR,
    CUBIC_EXP_ERROR,
    FLOAT8_E4M3_HALF_SUBNORMAL,
    FLOAT8_E4M3_ROUNDOFF,
    FLOAT32_ROUNDOFF,
    TF32_ROUNDOFF,
    TF32X3_ROUNDOFF,
    Number,
    accumulation_roundoff,
    half_smallest_subnormal,
    unit_roundoff,
)
from attnfuzz.problems.declared_numerics import Numerics

__all__ = ["Arithmetic", "attention_arithmetic", "merge_arithmetic", "side_by_side"]


class Arithmetic(NamedTuple):
    """Units of roundings, relative unless they are called absolute; an absolute one counts for the smallest numbers.

    - `addition`: of a partial sum. `operand`: of every product q_d k_d, because its operands were rounded. Below
      `query_floor` and `key_floor`, over the scale or its root, a rounded operand errs by as much as there.
    - `copies`: 1.0 if threads may hold copies of a score that were rounded differently, else 0.0
      (`score_copies_error`). `score`: of each score and of each copy of it, by a product with a scale of K or because
      it is stored; then `score_absolute`, too. `tanh`: of that of a soft cap, beyond `TANH_ERROR`.
    - `exponential`: of exp, and `exponent`: of its argument, beyond float32.
    - `weight`, `weight_absolute`: of the softmax weights before they multiply V. `sums_rounded`: 1.0 if they are summed
      so, else 0.0. `value`: of V itself.
    - `partial`, `partial_absolute`: of stored partial results, which are combined in `is_split` stages, one after the
      other; 0.0 for none. `stored`, `stored_absolute`: of the result.
    """

    addition: Number = FLOAT32_ROUNDOFF
    operand: Number = 0.0
    copies: Number = 0.0
    score: Number = 0.0
    score_absolute: Number = 0.0
    query_floor: Number = 0.0
    key_floor: Number = 0.0
    exponential: Number = 0.0
    exponent: Number = 0.0
    weight: Number = 0.0
    weight_absolute: Number = 0.0
    sums_rounded: Number = 0.0
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
    one_copy: bool,
    num_partials: int = 2,
    smallest_kv: tuple[float, float] | None = None,
) -> Arithmetic:
    """Units of decode attention; arguments as those of `attention_bound`.

    TF32 changes both float32 operands of a product by t = 2^-10 each: 2t + t^2. Float16 and bfloat16 operands are exact
    in TF32, which numbers of an 8-bit cache times a scale are not. Matrix units that are not said to use it make a
    float32 product of three (`TF32X3_ROUNDOFF`).

    A query that is rounded after it was multiplied with the scale errs by max(u |s q_d|, eta), one or two operands of
    each product; scores that are stored, by as much before the scale and once more after it.

    Partial results that are merged in pairs, each result stored again, are rounded as often as the longest chain has
    merges, `num_partials` less one.

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
    is_short = in_dtype != torch.float32
    has_float32 = not is_short or smallest_kv is not None
    of_operand = {"ieee": 0.0, "tensor_core": TF32X3_ROUNDOFF, "tf32": 2 * TF32_ROUNDOFF + TF32_ROUNDOFF**2}
    of_value = of_operand | {"tf32": TF32_ROUNDOFF}
    weight, weight_absolute = _weights(numerics, in_dtype)
    arithmetic = Arithmetic(
        addition=accumulation_roundoff(numerics),
        operand=of_operand[numerics.matmul] if has_float32 else 0.0,
        copies=0.0 if one_copy else 1.0,
        weight=max(weight, TF32_ROUNDOFF) if numerics.matmul == "tf32" else weight,
        weight_absolute=weight_absolute,
        sums_rounded=float(weight > 0 and numerics.row_sum == "input"),
        value=of_value[numerics.matmul] if has_float32 else 0.0,
        exponential=CUBIC_EXP_ERROR if numerics.exponential == "cubic" else 0.0,
        tanh=APPROXIMATE_TANH_ERROR if numerics.tanh == "approximate" else 0.0,
    )
    if is_short:
        arithmetic = _in_short_numbers(arithmetic, numerics, *_rounding_to(in_dtype))
    if smallest_kv is not None:
        of_k, of_v = (_dequantising(numerics, in_dtype, smallest) for smallest in smallest_kv)
        arithmetic = arithmetic._replace(
            operand=arithmetic.operand + of_k,
            score=arithmetic.score + FLOAT32_ROUNDOFF,
            value=arithmetic.value + FLOAT32_ROUNDOFF + of_v,
        )
    stored, stored_absolute = _rounding_to(out_dtype)
    if partial_merge:
        return arithmetic._replace(is_split=1.0, partial=stored, partial_absolute=stored_absolute)
    if is_split:
        partials = torch.float32 if numerics.partials == "float32" else in_dtype
        partial, partial_absolute = _rounding_to(partials)
        stages = float(max(1, num_partials - 1)) if numerics.partials == "chained" else 1.0
        arithmetic = arithmetic._replace(
            is_split=stages, partial=stages * partial, partial_absolute=stages * partial_absolute
        )
    return arithmetic._replace(stored=stored, stored_absolute=stored_absolute)


@lru_cache(maxsize=256)
def merge_arithmetic(out_dtype: torch.dtype) -> Arithmetic:
    """Units of a merge in float32 that stores its output in `out_dtype`. Raises `ValueError` for an unknown dtype."""
    stored, stored_absolute = _rounding_to(out_dtype)
    return Arithmetic(stored=stored, stored_absolute=stored_absolute)


def _weights(numerics: Numerics, in_dtype: torch.dtype) -> tuple[float, float]:
    if numerics.probabilities == "float8_e4m3fn":
        return FLOAT8_E4M3_ROUNDOFF, FLOAT8_E4M3_HALF_SUBNORMAL
    if numerics.probabilities == "float32" or in_dtype == torch.float32:
        return 0.0, 0.0
    return _rounding_to(in_dtype)


def _in_short_numbers(arithmetic: Arithmetic, numerics: Numerics, unit: float, absolute: float) -> Arithmetic:
    """What is declared to be kept in the 16-bit dtype of q, of which `unit` and `absolute` are the roundings."""
    of_query = {"float32": 0.0, "scaled": unit, "scaled_both": 2 * unit + unit**2}[numerics.query]
    stores_scores, has_short_exp = numerics.scores == "input", numerics.exponential == "input"
    if has_short_exp:
        arithmetic = arithmetic._replace(
            exponential=unit / (1 - unit),
            exponent=unit,
            weight=max(unit, arithmetic.weight),
            weight_absolute=max(absolute, arithmetic.weight_absolute),
        )
    return arithmetic._replace(
        operand=arithmetic.operand + of_query,
        query_floor=absolute / unit if numerics.query != "float32" else 0.0,
        key_floor=absolute / unit if numerics.query == "scaled_both" else 0.0,
        score=2 * unit + unit**2 if stores_scores else 0.0,
        score_absolute=absolute if stores_scores else 0.0,
    )


def _dequantising(numerics: Numerics, in_dtype: torch.dtype, smallest: float) -> float:
    """Of a number of the cache times its scale."""
    if numerics.dequantised == "float32" or in_dtype == torch.float32:
        return FLOAT32_ROUNDOFF
    relative, absolute = _rounding_to(in_dtype)
    return (1 + FLOAT32_ROUNDOFF) * (1 + max(relative, absolute / smallest)) - 1


def _rounding_to(dtype: torch.dtype) -> tuple[float, float]:
    return unit_roundoff(dtype), half_smallest_subnormal(dtype)
