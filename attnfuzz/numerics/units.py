"""Rounding units: how much one operation, or n of them, can change a number.

Unit roundoff u is half the distance from 1 to the next larger number; rounding to nearest changes a normal number by
at most u relatively, truncation by at most 2u (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §2.1).
"""

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.problems.declared_numerics import Numerics

Number = float | int | Float64[Tensor, " rows"]
"""A number, or one for each row of many."""

__all__ = [
    "APPROXIMATE_TANH_ERROR",
    "CUBIC_EXP_ERROR",
    "EXP_ERROR",
    "FLOAT8_E4M3_HALF_SUBNORMAL",
    "FLOAT8_E4M3_ROUNDOFF",
    "FLOAT32_ROUNDOFF",
    "LOG_ERROR",
    "SMALLEST_NORMAL_FLOAT32",
    "TANH_ERROR",
    "TF32X3_ROUNDOFF",
    "TF32_ROUNDOFF",
    "Number",
    "accumulation_roundoff",
    "gamma",
    "half_smallest_subnormal",
    "unit_roundoff",
]

_SIGNIFICAND_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}
_SMALLEST_SUBNORMAL_EXPONENT = {torch.float16: -24, torch.bfloat16: -133, torch.float32: -149}

FLOAT32_ROUNDOFF = 2.0**-24

FLOAT8_E4M3_ROUNDOFF = 2.0**-4
FLOAT8_E4M3_HALF_SUBNORMAL = 2.0**-10

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
"""Of the instruction `tanh.approx.f32`, relative, as the PTX manual has it (what is measured is 2^-16.5)."""

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
