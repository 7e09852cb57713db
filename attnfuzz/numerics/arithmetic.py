"""Rounding units: how much one operation, or n of them, can change a number, and which of them a kernel may make.

Unit roundoff u is half the distance from 1 to the next larger number; rounding to nearest changes a normal number by
at most u relatively, truncation by at most 2u (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §2.1).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.problems.declared_numerics import Numerics

Number = float | int | Float64[Tensor, " #rows"]
"""A number, or one for each row of many, or for all of them."""


_SIGNIFICAND_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}
_SMALLEST_SUBNORMAL_EXPONENT = {torch.float16: -24, torch.bfloat16: -133, torch.float32: -149}

FLOAT32_ROUNDOFF = 2.0**-24

FLOAT8_E4M3_ROUNDOFF = 2.0**-4
FLOAT8_E4M3_HALF_SUBNORMAL = 2.0**-10
FLOAT8_E4M3_LARGEST = 448.0
_SHORT_QUERY = FLOAT8_E4M3_ROUNDOFF * (1 + 2.0**-12)
"""Of a product with a query in 8 bits: its sums then round numbers that are up to 1/16 larger."""

SMALLEST_NORMAL_FLOAT32 = 2.0**-126
"""GPU code may flush anything below this to zero: an absolute error for each operation on top of the relative one."""

EXP_ERROR = 6 * FLOAT32_ROUNDOFF
"""Relative error of exp or exp2 beyond that of its argument: 2 ulp in CUDA's table of maximum errors, 2^-22 for the
`ex2.approx` instruction that Triton emits, 2.52 ulp measured by NumPy for its AVX-512 exp (the interpreter's). One
ulp is at most 2u; the slowest of these is 5.04u."""

CUBIC_EXP_ERROR = 2.0**-13.5
"""Relative error of the polynomial of degree 3 that stands in for exp2 on [0, 1) in FlashAttention 4."""

LOG_ERROR = 8 * FLOAT32_ROUNDOFF
"""Error of log or log2 relative to 1 + |log x|: 1 ulp for CUDA's logf, 2^-21.41 absolute near 1 and 3 ulp elsewhere for
`__logf`, 3.83 ulp for NumPy's AVX-512 log."""

TANH_ERROR = 12 * FLOAT32_ROUNDOFF
"""Absolute error of t = tanh y beyond that of y, in whichever of these ways it is written, with `EXP_ERROR` for exp, 4u
for a division (2 ulp), u for an addition, and 2u for the product of the exponent with log2(e) and that constant:
a library's, 2 ulp = 4u |t|; (E - 1) / (E + 1) and 1 - 2 / (E + 1) with E = exp(2y), 2 / (1 + 1 / E) - 1, and
(exp(y) - exp(-y)) / (exp(y) + exp(-y)). An error of E is felt times (1 - t^2) / 2, as d/dE (1 - 2 / (E + 1)) = 2 /
(E + 1)^2 says; the exponent's likewise, on |y| (1 - t^2) < 1/2. The worst is 1 - 2 / (E + 1) near t = -0.9:
3u (1 - t^2) + u + 5u (1 - t) + u |t| < 12u."""

APPROXIMATE_TANH_ERROR = 2.0**-11
"""Relative error of the instruction `tanh.approx.f32`, as the PTX manual has it (what is measured is 2^-16.5)."""

TF32_ROUNDOFF = 2.0**-10
"""TF32 keeps 10 fraction bits. `cvt.rna.tf32` rounds (2^-11), but operands that reach the tensor core unconverted, as
Triton's do, lose their low bits: on an H100 (Triton 3.6) `tl.dot` reads 1 + 0.75 * 2^-10 as 1."""

TF32X3_ROUNDOFF = 8 * FLOAT32_ROUNDOFF
"""Of a float32 product that is made of three TF32 ones, x = h + l + r with h and l in TF32, rounded (`cvt.rna`): l has
up to 12 bits and keeps 11, so |r| <= 2u |x|, once for each operand; and l l', at most 2^-11 2^-11 = 4u, is left out."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative change when a normal number is rounded to float16, bfloat16 or float32.

    Raises `ValueError` for any other dtype.
    """
    return 2.0 ** -_looked_up(_SIGNIFICAND_BITS, dtype)


def half_smallest_subnormal(dtype: torch.dtype) -> float:
    """Largest absolute change when a number below the normal range is rounded to `dtype`.

    Raises `ValueError` unless `dtype` is float16, bfloat16 or float32.
    """
    return 2.0 ** (_looked_up(_SMALLEST_SUBNORMAL_EXPONENT, dtype) - 1)


def accumulation_roundoff(numerics: Numerics) -> float:
    """Relative change u of a float32 partial sum by one addition: n terms in any order err by gamma(n, u) M.

    M is the larger of the sum of the positive terms and that of the others' magnitudes, which no partial sum exceeds.
    Rounding to nearest: 2^-24 for each addition.

    Tensor cores add N products and an accumulator at once. All are aligned to the exponent of the largest, where e bits
    more than float32's are kept; the others are dropped, the sum is exact, and is cut to 24 bits at its end. For
    16-bit operands N, e are 4, 0 on sm_70, 8, 1 on sm_80 to sm_89, and 16, 2 on sm_90 and sm_100; for TF32 N is half of
    that (Fasi, Higham, Mikaitis, Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ CS 7:e330, 2021; Khattak,
    Mikaitis, Accurate models of NVIDIA tensor cores, arXiv:2512.07004, 2025, and their models).

    With 2^E the exponent of the largest, N terms lose less than 2^(E-23-e) each, and the largest nothing. Of a sum S
    in 2^(E+k) <= |S| < 2^(E+k+1) the cut takes at most (2^(k+e) - 1) 2^(E-23-e), and nothing where k + e <= 0. With
    2^E <= M and 2^(E+k) <= |S| <= M a block errs by at most

        2^-23 (N 2^-e + 1 - 2^-e) M <= 2^-23 N M    for k <= 0,
        2^-23 (N 2^-e 2^-k + 1 - 2^(-k-e)) M <= 2^-23 N M    else,

    since N >= 1: 2^-23 M for each of its terms, which sm_70 nearly reaches. Blocks add up as roundings do, by `gamma`.
    The FP8 units of sm_89 and sm_90 keep 13 bits after the point in place of 23 + e: no kernel gets that undeclared.
    """
    return FLOAT32_ROUNDOFF if numerics.matmul == "ieee" else 2 * FLOAT32_ROUNDOFF


def gamma(num_operations: Number, roundoff: Number) -> Number:
    """Higham's gamma_n = n*u / (1 - n*u): the relative error of n successive roundings (Lemma 3.1).

    Numbers or tensors. Raises `ValueError` where n*u >= 1/2, beyond which a float32 sum carries no information.
    """
    product = num_operations * roundoff
    largest = float(product.max()) if isinstance(product, Tensor) else product
    if largest >= 0.5:
        raise ValueError(
            f"{num_operations!r} operations with unit roundoff {roundoff!r} must stay below 0.5 in product; "
            "use shorter sequences"
        )
    return product / (1 - product)


def _looked_up(table: dict[torch.dtype, int], dtype: torch.dtype) -> int:
    if dtype not in table:
        supported = ", ".join(str(key) for key in table)
        raise ValueError(f"dtype={dtype!r} must be one of {supported}; the error model knows no other")
    return table[dtype]


class Arithmetic(NamedTuple):
    """Units of roundings, relative unless they are called absolute; an absolute one counts for the smallest numbers.

    - `addition`: of a partial sum. `operand`: of every product q_d k_d, because its operands were rounded. Below
      `query_floor` and `key_floor`, over the scale or its root, a rounded operand errs by as much as there; so does q
      itself below `own_query_floor`. Nothing is promised of a row with a number of q above `query_limit`.
    - `copies`: 1.0 if threads may hold copies of a score that were rounded differently, else 0.0
      (`score_copies_error`). `score`: of each score and of each copy of it, by a product with a scale of K or because
      it is stored; then `score_absolute`, too. `score_limit`: from which on what is stored of a score is no number:
      then nothing is promised of its row. `tanh`: of that of a soft cap, beyond `TANH_ERROR`.
    - `exponential`: of exp, and `exponent`: of its argument, beyond float32.
    - `weight`, `weight_absolute`: of the softmax weights before they multiply V. `sums_rounded`: 1.0 if they are summed
      so, else 0.0. `value`: of V itself.
    - `tile`: of every product of a weight and V, because sums over a tile of keys are rounded; then `tile_absolute`
      for each, too.
    - `partial`, `partial_absolute`: of stored partial results, which are combined in `is_split` stages, one after the
      other, and stored after each; 0.0 for none. `by_lse`: 1.0 if they may have weights exp(lse_s - lse) that nothing
      is divided by, else 0.0 (`normaliser_error`). `stored`, `stored_absolute`: of the result.
    """

    addition: Number = FLOAT32_ROUNDOFF
    operand: Number = 0.0
    copies: Number = 0.0
    score: Number = 0.0
    score_absolute: Number = 0.0
    score_limit: Number = math.inf
    query_floor: Number = 0.0
    own_query_floor: Number = 0.0
    query_limit: Number = math.inf
    key_floor: Number = 0.0
    exponential: Number = 0.0
    exponent: Number = 0.0
    weight: Number = 0.0
    weight_absolute: Number = 0.0
    sums_rounded: Number = 0.0
    value: Number = 0.0
    tile: Number = 0.0
    tile_absolute: Number = 0.0
    is_split: Number = 0.0
    by_lse: Number = 0.0
    partial: Number = 0.0
    partial_absolute: Number = 0.0
    stored: Number = 0.0
    stored_absolute: Number = 0.0
    tanh: Number = 0.0

    def of_rows(self, num_tokens: Float64[Tensor, "*rows"]) -> Arithmetic:
        """The arithmetic of rows of so many tokens, with `partial` and `partial_absolute` of all stages together.

        Each partial result has a token of its own, or nothing is rounded when it is merged: the other state has all
        the weight, and was stored before.
        """
        stages = torch.as_tensor(self.is_split, dtype=num_tokens.dtype, device=num_tokens.device)
        stages = torch.minimum(stages, (num_tokens - 1).clamp(min=1))
        return self._replace(
            is_split=stages, partial=stages * self.partial, partial_absolute=stages * self.partial_absolute
        )


def side_by_side(rows: list[Arithmetic]) -> Arithmetic:
    """The arithmetic of many rows: float64 tensors on the CPU."""
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
    each product; scores that are stored, by as much before the scale and once more after it. One that is itself rounded
    to 8 bits errs by max(2^-4 |q_d|, 2^-10), so that q.k errs by no more than 2^-4 sum_d max(|q_d|, 2^-6) |k_d|, as an
    operand's error with a floor says; a number of q that is 0 stays so.

    Partial results that are merged in pairs, each result stored again, are rounded as often as the longest chain has
    merges, `num_partials` less one, or one for each further token (`Arithmetic.of_rows`).

    A sum over a tile of keys that is rounded once errs by u |sum|, and all of them together by u sum_i p_i |v_i|. Where
    eight products are made and added in 16 bits, as vLLM does (`dot` in its `dtype_float16.cuh`: one rounding of each
    product, two numbers to a register, three additions of registers, the last one in float32), each has four. What lies
    below the normal range errs by eta for each sum or product, weights being at most 1.

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
    has_short_query = numerics.query == "float8_e4m3fn"
    weight, weight_absolute = _weights(numerics, in_dtype)
    arithmetic = Arithmetic(
        addition=accumulation_roundoff(numerics),
        operand=(of_operand[numerics.matmul] if has_float32 else 0.0) + has_short_query * _SHORT_QUERY,
        own_query_floor=has_short_query * FLOAT8_E4M3_HALF_SUBNORMAL / FLOAT8_E4M3_ROUNDOFF,
        query_limit=FLOAT8_E4M3_LARGEST if has_short_query else math.inf,
        copies=0.0 if one_copy else 1.0,
        weight=max(weight, TF32_ROUNDOFF) if numerics.matmul == "tf32" else weight,
        weight_absolute=weight_absolute,
        sums_rounded=float(weight > 0 and numerics.row_sum == "input"),
        value=of_value[numerics.matmul] if has_float32 else 0.0,
        exponential=CUBIC_EXP_ERROR if numerics.exponential == "cubic" else 0.0,
        tanh=APPROXIMATE_TANH_ERROR if numerics.tanh == "approximate" else 0.0,
    )
    if is_short:
        arithmetic = _in_short_numbers(arithmetic, numerics, *_rounding_to(in_dtype), torch.finfo(in_dtype).max)
    if smallest_kv is not None:
        of_k, of_v = (_dequantising(numerics, in_dtype, smallest) for smallest in smallest_kv)
        arithmetic = arithmetic._replace(
            operand=arithmetic.operand + of_k,
            score=arithmetic.score + FLOAT32_ROUNDOFF,
            value=arithmetic.value + FLOAT32_ROUNDOFF + of_v,
        )
    stored, stored_absolute = _rounding_to(out_dtype)
    if partial_merge:
        return arithmetic._replace(is_split=1.0, by_lse=1.0, partial=stored, partial_absolute=stored_absolute)
    if is_split:
        partials = torch.float32 if numerics.partials == "float32" else in_dtype
        partial, partial_absolute = _rounding_to(partials)
        stages = float(max(1, num_partials - 1)) if numerics.partials == "chained" else 1.0
        arithmetic = arithmetic._replace(
            is_split=stages, by_lse=1.0, partial=partial, partial_absolute=partial_absolute
        )
    return arithmetic._replace(stored=stored, stored_absolute=stored_absolute)


@lru_cache(maxsize=256)
def merge_arithmetic(out_dtype: torch.dtype) -> Arithmetic:
    """Units of a merge in float32 that stores its output in `out_dtype`. Raises `ValueError` for an unknown dtype."""
    stored, stored_absolute = _rounding_to(out_dtype)
    return Arithmetic(by_lse=1.0, stored=stored, stored_absolute=stored_absolute)


def _weights(numerics: Numerics, in_dtype: torch.dtype) -> tuple[float, float]:
    if numerics.probabilities == "float8_e4m3fn":
        return FLOAT8_E4M3_ROUNDOFF, FLOAT8_E4M3_HALF_SUBNORMAL
    if numerics.probabilities == "float32" or in_dtype == torch.float32:
        return 0.0, 0.0
    return _rounding_to(in_dtype)


def _in_short_numbers(
    arithmetic: Arithmetic, numerics: Numerics, unit: float, absolute: float, limit: float
) -> Arithmetic:
    """Roundings that are declared to be to the 16-bit dtype of q, of which `unit` and `absolute` are the roundings.

    `limit` is its largest number.
    """
    of_query = {"scaled": unit, "scaled_both": 2 * unit + unit**2}.get(numerics.query, 0.0)
    roundings = _ROUNDINGS_OF_TILE[numerics.tile_sums]
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
        query_floor=absolute / unit if of_query else 0.0,
        key_floor=absolute / unit if numerics.query == "scaled_both" else 0.0,
        score=2 * unit + unit**2 if stores_scores else 0.0,
        score_absolute=absolute if stores_scores else 0.0,
        score_limit=limit if stores_scores else math.inf,
        tile=(1 + unit) ** roundings - 1,
        tile_absolute=absolute if roundings else 0.0,
    )


_ROUNDINGS_OF_TILE = {"float32": 0, "rounded": 1, "input": 4}
"""To 16 bits, of each weight times V."""


def _dequantising(numerics: Numerics, in_dtype: torch.dtype, smallest: float) -> float:
    """The rounding of a number of the cache times its scale."""
    if numerics.dequantised == "float32" or in_dtype == torch.float32:
        return FLOAT32_ROUNDOFF
    relative, absolute = _rounding_to(in_dtype)
    return (1 + FLOAT32_ROUNDOFF) * (1 + max(relative, absolute / smallest)) - 1


def _rounding_to(dtype: torch.dtype) -> tuple[float, float]:
    return unit_roundoff(dtype), half_smallest_subnormal(dtype)
