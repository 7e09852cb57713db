"""Formats of caches with several numbers in a byte: what readers, writers and references say alike of them.

A number is the value of its code times the scale of its block, times one of the whole tensor where a format has that.
Two codes lie in a byte, the first in its lower half, as vLLM, FlashInfer and the OCP's microscaling formats have it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float64, UInt8
from torch import Tensor

from attnfuzz.numerics.rounded import Rounded

__all__ = ["FORMATS", "LEAST_SCALE", "SCALE_ERROR", "Between", "PackedFormat", "Written"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
LEAST_SCALE = 1e-6
"""Scale of a row of zeros, which has none of its own; vLLM's."""
SCALE_ERROR = 2.0**-21
"""Relative, of a quotient in float32 or of a product with a reciprocal; of a scale that was rounded as well."""


class Between(NamedTuple):
    """What a right kernel may have: one number, where ``low`` and ``high`` are equal."""

    low: Tensor
    high: Tensor

    def rounded(self) -> Rounded:
        """The number in the middle, and how far the others are from it."""
        return Rounded((self.low + self.high) / 2, (self.high - self.low) / 2)


class Written(NamedTuple):
    """What may be stored of the numbers of tokens and heads, and the ``numbers`` that it stands for."""

    packed: Between
    scales: Between
    zeros: Between | None
    numbers: Between


class PackedFormat(NamedTuple):
    """``values``: of the 16 codes. ``block``: numbers of a token and head that share a scale; 0 for all of them.

    ``scale_dtype``: of these; uint8 for an exponent of two, with 127 for 1. ``has_zeros``: a code stands for its
    distance from the zero point of its token and head. ``has_global``: there is one more scale for the whole tensor.
    """

    values: tuple[float, ...]
    block: int
    scale_dtype: str
    has_zeros: bool = False
    has_global: bool = False

    def codes(self, packed: UInt8[Tensor, "*rows bytes"]) -> UInt8[Tensor, "*rows size"]:
        """The codes in their order."""
        return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)

    def packed(self, codes: UInt8[Tensor, "*rows size"]) -> UInt8[Tensor, "*rows bytes"]:
        """The bytes that hold ``codes``."""
        return torch.bitwise_or(codes[..., ::2], codes[..., 1::2] << 4)

    def scale(self, stored: Tensor) -> Float64[Tensor, "..."]:
        """The scales that ``stored`` stands for."""
        return torch.exp2(stored.double() - 127) if stored.dtype is torch.uint8 else stored.double()

    def read(
        self, packed: Tensor, scales: Tensor, zeros: Tensor | None = None, of_all: Tensor | None = None
    ) -> Float64[Tensor, "*rows size"]:
        """The numbers, exactly. ``scales [*rows, blocks]``, ``zeros [*rows]``."""
        codes = self.codes(packed)
        numbers = torch.tensor(self.values, dtype=torch.float64, device="cpu")[codes.int()]
        if zeros is not None:
            numbers = numbers - zeros.double()[..., None]
        factors = self.scale(scales).repeat_interleave(codes.shape[-1] // scales.shape[-1], dim=-1)
        return numbers * factors * (1.0 if of_all is None else of_all.double())

    def write(self, new: Rounded, of_all: Tensor | None = None) -> Written:
        """How a kernel stores ``new [*rows, size]`` that computes in float32, of int4 and NVFP4.

        int4: the scale is ``(max x - min x) / 15`` and the zero point ``-min x / scale``, rounded and cut to 0 to 15.
        NVFP4: the scale is ``max |x| / 6 / of_all``, rounded to its format; numbers are divided by what is stored and
        keep their signs. Where rounding is a near thing, either is right.
        """
        return _with_zeros(self, new) if self.has_zeros else _with_signs(self, new, of_all)


def _with_zeros(form: PackedFormat, new: Rounded) -> Written:
    least, error = new.value.amin(-1), new.error.amax(-1)
    scales = (new.value.amax(-1) - least).div(15).clamp(min=LEAST_SCALE)
    of_scales = error * 2 / 15
    loose = torch.where(scales <= LEAST_SCALE, 2 * LEAST_SCALE, SCALE_ERROR * scales + of_scales)
    zero, quotient = -least / scales, new.value / scales[..., None]
    zeros = _near(zero, 1.0, (error + zero.abs() * of_scales) / scales)
    of_codes = (new.error + quotient.abs() * of_scales[..., None]) / scales[..., None]
    low = _near(quotient + zeros.low[..., None], quotient.abs() + 16, of_codes).low
    high = _near(quotient + zeros.high[..., None], quotient.abs() + 16, of_codes).high
    steps = Between(low - zeros.high[..., None], high - zeros.low[..., None]).rounded()
    value = steps.value * scales[..., None]
    off = steps.error * scales[..., None] + (steps.value.abs() + steps.error) * loose[..., None]
    packed = Between(*(form.packed(codes.to(torch.uint8)).double() for codes in (low, high)))
    return Written(packed, Between(scales - loose, scales + loose), zeros, Between(value - off, value + off))


def _near(number: Tensor, size: Tensor | float, error: Tensor) -> Between:
    """The codes that a number may become which was worked out in float32 of parts as large as ``size``."""
    off = SCALE_ERROR * (number.abs() + size) + error
    return Between((number - off + 0.5).floor().clamp(0, 15), (number + off + 0.5).floor().clamp(0, 15))


_LEAST_E4M3 = 2.0**-6
"""The smallest normal number, up to which the scale of a block of zeros may be anything."""


def _with_signs(form: PackedFormat, new: Rounded, of_all: Tensor | None) -> Written:
    whole = 1.0 if of_all is None else float(of_all)
    value, error = (part.view(*part.shape[:-1], part.shape[-1] // form.block, form.block) for part in new)
    largest, off = value.abs().amax(-1) / 6 / whole, error.amax(-1) / 6 / whole
    off = off + SCALE_ERROR * largest
    stored = Between(*((largest + way * off).clamp(0, 448).to(torch.float8_e4m3fn).double() for way in (-1, 1)))
    least, most = (scales[..., None].clamp(min=2.0**-10) * whole for scales in stored)
    ties = torch.tensor(_E2M1_TIES, dtype=torch.float64, device="cpu")
    low = torch.bucketize((value.abs() - error) / most * (1 - SCALE_ERROR), ties)
    high = torch.bucketize((value.abs() + error) / least * (1 + SCALE_ERROR), ties, right=True)
    is_negative, is_unsure = value.signbit(), (error > 0) & (value.abs() <= error)
    codes = (
        torch.where(is_negative | is_unsure, torch.where((low > 0) & ~is_unsure, low + 8, 0), low),
        torch.where(is_negative | is_unsure, high + 8, high),
    )
    sizes = torch.tensor(_E2M1, dtype=torch.float64, device="cpu")
    near, far = sizes[low] * stored.low[..., None] * whole, sizes[high] * stored.high[..., None] * whole
    numbers = (
        torch.where(is_negative, -far, torch.where(is_unsure, -far, near)),
        torch.where(is_negative & ~is_unsure, -near, far),
    )
    packed = Between(*(form.packed(part.flatten(-2).to(torch.uint8)).double() for part in codes))
    scales = Between(stored.low, torch.where(value.abs().amax(-1) == 0, _LEAST_E4M3, stored.high))
    return Written(packed, scales, None, Between(*(part.flatten(-2) for part in numbers)))


_SIGNED_E2M1 = (*_E2M1, *(-value for value in _E2M1))
FORMATS = {
    "int4": PackedFormat(tuple(map(float, range(16))), 0, "float32", has_zeros=True),
    "nvfp4": PackedFormat(_SIGNED_E2M1, 16, "float8_e4m3fn", has_global=True),
    "mxfp4": PackedFormat(_SIGNED_E2M1, 32, "uint8"),
}
"""int4 as in vLLM's ``int4_per_token_head``; NVIDIA's and the OCP's 4-bit floating-point formats."""
