"""What a kernel declares about its own arithmetic. Torch-free, so that a declaration can cross a pipe as data."""

from typing import Literal, get_args

import msgspec

__all__ = ["Matmul", "Numerics", "Precision", "Tanh"]

Precision = Literal["float32", "input"]
Matmul = Literal["ieee", "tensor_core", "tf32"]
Tanh = Literal["float32", "approximate"]


class Numerics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Roundings a kernel makes on purpose; the error bounds of `attnfuzz.numerics` allow these and no others.

    The defaults are the loosest arithmetic for the dtype at hand, except for what costs three decimal digits and must
    be declared: multiplying float32 inputs in TF32, rounding what an 8-bit cache stands for, and an approximate `tanh`.

    - `probabilities`: what the softmax weights are rounded to before they multiply V: `"input"` (the dtype of q,
      which k and v have unless the cache has 8 bits, as `p.to(v.dtype)` before `tl.dot`) or `"float32"`.
    - `partials`: what split results are stored as before they are combined: `"input"` or `"float32"`.
    - `matmul`: `"ieee"` (float32 additions rounded to nearest), `"tensor_core"` (float32 accumulation that
      truncates) or `"tf32"` (float32 operands also lose their low 13 bits; implies truncating accumulation).
    - `dequantised`, where the cache has 8 bits: what K and V times their scales are kept in before they are multiplied:
      `"float32"` (or the scales are multiplied into the scores and the result) or `"input"` (the dtype of q, as vLLM's
      `(k.to(float32) * k_scale).to(q.dtype)`).
    - `tanh`, where scores have a soft cap: `"float32"` (a library's, or written with exponentials) or `"approximate"`
      (the instruction `tanh.approx.f32`, as in FlashAttention and FlashInfer).

    Raises `ValueError` for any other value.
    """

    probabilities: Precision = "input"
    partials: Precision = "input"
    matmul: Matmul = "tensor_core"
    dequantised: Precision = "float32"
    tanh: Tanh = "float32"

    def __post_init__(self) -> None:
        _require_one_of("probabilities", self.probabilities, get_args(Precision))
        _require_one_of("partials", self.partials, get_args(Precision))
        _require_one_of("matmul", self.matmul, get_args(Matmul))
        _require_one_of("dequantised", self.dequantised, get_args(Precision))
        _require_one_of("tanh", self.tanh, get_args(Tanh))


def _require_one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"Numerics: {field}={value!r} must be one of {choices}; leave {field} out for the loosest one")
