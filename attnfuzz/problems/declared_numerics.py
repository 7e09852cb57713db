"""Declarations of a kernel about its own arithmetic, and how far a result may be from the reference.

Torch-free, so that a declaration can cross a pipe as data.
"""

import math
from typing import Any, Literal, get_args

import msgspec

from attnfuzz.problems.supports import Declared

Precision = Literal["float32", "input"]
Query = Literal["float32", "scaled", "scaled_both", "float8_e4m3fn"]
Exponential = Literal["float32", "cubic", "input"]
Probabilities = Literal["float32", "input", "float8_e4m3fn"]
Partials = Literal["float32", "input", "chained"]
Matmul = Literal["ieee", "tensor_core", "tf32"]
Tanh = Literal["float32", "approximate"]
TileSums = Literal["float32", "rounded", "input"]


class Numerics(Declared, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Roundings a kernel makes on purpose; the error bounds of `attnfuzz.numerics` allow these and no others.

    The defaults are the loosest arithmetic that engines ship as their normal path. What costs decimal digits that
    others keep must be declared: multiplying float32 inputs in TF32, rounding what an 8-bit cache stands for, scores,
    queries times the scale, exponentials or weights times V in 16 bits, weights in 8, and an approximate `tanh`.

    - `query`: what q is in the product with k: `"float32"` (itself, or times the scale in float32), `"scaled"` (q times
      the scale, with log2(e) or without, rounded to the dtype of q, as FlexAttention's `PRESCALE_QK`),
      `"scaled_both"` (q and k times the scale's root, each rounded, as in torch's math SDPA) or `"float8_e4m3fn"` (q
      itself rounded to the cache's 8 bits, as SGLang's `tl.dot(q.to(k.dtype), k)`; nothing is promised of rows with
      a number of q above 448, the largest of that format).
    - `scores`: what they are stored as: `"float32"` or `"input"` (16 bits, before and after the scale).
    - `exponential`: `"float32"`, `"cubic"` (a polynomial of degree 3 in place of exp2, as in FlashAttention 4) or
      `"input"` (exp2 of 16-bit numbers, `ex2.approx.f16x2`).
    - `probabilities`: what the softmax weights are rounded to before they multiply V: `"input"` (the dtype of q,
      which k and v have unless the cache has 8 bits, as `p.to(v.dtype)` before `tl.dot`), `"float32"` or
      `"float8_e4m3fn"` (as FlashAttention 3 with an 8-bit cache).
    - `row_sum`, where `probabilities` rounds: whether the sum that divides is one of rounded weights, `"input"`, as in
      FlashInfer, or of those before, `"float32"`.
    - `tile_sums`: what weights times V are summed in over a tile of keys, before tiles are added up in float32:
      `"float32"`, `"rounded"` (so, and each sum is rounded to the dtype of q, as a 16-bit matrix product returns it) or
      `"input"` (products and their sums in 16 bits, eight keys to a tile, as in vLLM's CUDA paged attention).
    - `partials`: what split results are stored as before they are combined: `"input"`, `"float32"`, or `"chained"`:
      as `"input"`, and combined in pairs, one after the other, where each result is stored again. An option
      `num_splits` says how many there are at most; without one, there may be as many as keys.
    - `matmul`: `"ieee"` (float32 additions rounded to nearest), `"tensor_core"` (float32 accumulation that
      truncates) or `"tf32"` (float32 operands also lose their low 13 bits; implies truncating accumulation).
    - `dequantised`, where the cache has 8 bits: what K and V times their scales are kept in before they are multiplied:
      `"float32"` (or the scales are multiplied into the scores and the result) or `"input"` (the dtype of q, as vLLM's
      `(k.to(float32) * k_scale).to(q.dtype)`).
    - `tanh`, where scores have a soft cap: `"float32"` (a library's, or written with exponentials) or `"approximate"`
      (the instruction `tanh.approx.f32`, as in FlashAttention and FlashInfer).

    Raises `ValueError` for any other value.
    """

    query: Query = "float32"
    scores: Precision = "float32"
    exponential: Exponential = "float32"
    probabilities: Probabilities = "input"
    row_sum: Precision = "input"
    tile_sums: TileSums = "float32"
    partials: Partials = "input"
    matmul: Matmul = "tensor_core"
    dequantised: Precision = "float32"
    tanh: Tanh = "float32"

    def __post_init__(self) -> None:
        for field, allowed in _ALLOWED.items():
            _require_one_of(field, getattr(self, field), allowed)


def _require_one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"Numerics: {field}={value!r} must be one of {choices}; leave {field} out for the loosest one")


_ALLOWED: dict[str, tuple[str, ...]] = {
    "query": get_args(Query),
    "scores": get_args(Precision),
    "exponential": get_args(Exponential),
    "probabilities": get_args(Probabilities),
    "row_sum": get_args(Precision),
    "tile_sums": get_args(TileSums),
    "partials": get_args(Partials),
    "matmul": get_args(Matmul),
    "dequantised": get_args(Precision),
    "tanh": get_args(Tanh),
}


class FixedTolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`|got - expected| <= atol + rtol * |expected|`, for those who must match another suite.

    Raises `ValueError` for a negative, NaN or infinite `atol` or `rtol`.
    """

    atol: float
    rtol: float

    def __post_init__(self) -> None:
        _require_finite_non_negative("atol", self.atol)
        _require_finite_non_negative("rtol", self.rtol)

    def bound(self, expected: Any) -> Any:
        """The largest error allowed at each element of `expected` (a number or a tensor), in its shape and dtype."""
        return self.atol + self.rtol * abs(expected)


Tolerance = Literal["bound"] | FixedTolerance
"""`"bound"`: the derived bounds of `attnfuzz.numerics`, the default."""


def _require_finite_non_negative(field: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]  # narrowed by is_number
        raise ValueError(
            f"FixedTolerance: {field}={value!r} must be a finite number >= 0; "
            'use tolerance="bound" for the derived error bounds'
        )
