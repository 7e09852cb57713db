"""Formats of quantised caches with scales of their own: what readers, writers and references say alike of them.

A number is the value of its code times the scale of its block, times one of the whole tensor where a format has that.
Of 4 bits two codes lie in a byte, the first in its lower half, as vLLM, FlashInfer and the OCP's microscaling formats
have it. In 8 bits the codes are numbers of int8 or float8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float64, UInt8
from torch import Tensor

from attnfuzz.numerics.rounded import Rounded

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
LEAST_SCALE = 1e-6
"""Scale of a row of zeros, which has none of its own; vLLM's."""
SCALE_ERROR = 2.0**-21
"""Relative, of a quotient in float32 or of a product with a reciprocal; of a scale that was rounded as well."""


class Between(NamedTuple):
    """The numbers that a right kernel may have: one, where ``low`` and ``high`` are equal."""

    low: Tensor
    high: Tensor

    def rounded(self) -> Rounded:
        """The number in the middle, and how far the others are from it."""
        return Rounded((self.low + self.high) / 2, (self.high - self.low) / 2)


class Written(NamedTuple):
    """Codes, scales and zero points that may be stored of tokens and heads, and the ``numbers`` they stand for."""

    packed: Between
    scales: Between
    zeros: Between | None
    numbers: Between


class PackedFormat(NamedTuple):
    """``values``: of the 16 codes; none where a code of 8 bits is a number itself. ``block``: numbers of a token and
    head that share a scale; 0 for all of them.

    ``scale_dtype``: of these; uint8 for an exponent of two, with 127 for 1. ``has_zeros``: a code stands for its
    distance from the zero point of its token and head. ``zeros_in_scales``: this is the lowest 4 bits of the scale, a
    float32, which count as 0 in it. ``has_global``: there is one more scale for the whole tensor. ``dtype``: of what
    is stored. ``is_rotated``: K and V times `rotation` are stored, not they themselves.
    """

    values: tuple[float, ...]
    block: int
    scale_dtype: str
    has_zeros: bool = False
    has_global: bool = False
    zeros_in_scales: bool = False
    dtype: str = "uint8"
    is_rotated: bool = False

    @property
    def numbers_in_one(self) -> int:
        """How many codes lie in one element of the cache."""
        return 2 if self.values else 1

    def codes(self, packed: UInt8[Tensor, "*rows bytes"]) -> UInt8[Tensor, "*rows size"]:
        """The codes in their order."""
        return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)

    def packed(self, codes: UInt8[Tensor, "*rows size"]) -> UInt8[Tensor, "*rows bytes"]:
        """The bytes that hold ``codes``."""
        return torch.bitwise_or(codes[..., ::2], codes[..., 1::2] << 4)

    def scale(self, stored: Tensor) -> Float64[Tensor, "..."]:
        """The scales that ``stored`` stands for."""
        if self.zeros_in_scales:
            stored = (stored.contiguous().view(torch.int32) & -16).view(torch.float32)
        return torch.exp2(stored.double() - 127) if stored.dtype is torch.uint8 else stored.double()

    def read(
        self, packed: Tensor, scales: Tensor, zeros: Tensor | None = None, of_all: Tensor | None = None
    ) -> Float64[Tensor, "*rows size"]:
        """The numbers, exactly. ``scales [*rows, blocks]``, ``zeros [*rows]``."""
        if self.values:
            numbers = torch.tensor(self.values, dtype=torch.float64, device="cpu")[self.codes(packed).int()]
        else:
            numbers = packed.double()
        if self.zeros_in_scales:
            zeros = scales.contiguous().view(torch.int32)[..., 0] & 15
        if zeros is not None:
            numbers = numbers - zeros.double()[..., None]
        factors = self.scale(scales).repeat_interleave(numbers.shape[-1] // scales.shape[-1], dim=-1)
        return numbers * factors * (1.0 if of_all is None else of_all.double())

    def write(self, new: Rounded, of_all: Tensor | None = None, scale_error: float = SCALE_ERROR) -> Written:
        """How a kernel stores ``new [*rows, size]`` that computes in float32, of int4 and NVFP4.

        int4: the scale is ``(max x - min x) / 15``, where 0 counts as one of the x, off by up to
        ``scale_error`` of it, and the zero point ``-min x / scale``, rounded.
        NVFP4: the scale is ``max |x| / 6 / of_all``, rounded to its format; numbers are divided by what is stored and
        keep their signs. Where rounding is a near thing, either is right.
        """
        return _with_zeros(self, new, scale_error) if self.has_zeros else _with_signs(self, new, of_all)


def _with_zeros(form: PackedFormat, new: Rounded, scale_error: float) -> Written:
    least, error = new.value.amin(-1).clamp(max=0), new.error.amax(-1)
    scales = (new.value.amax(-1).clamp(min=0) - least).div(15).clamp(min=LEAST_SCALE)
    of_scales = error * 2 / 15
    loose = torch.where(scales <= LEAST_SCALE, 2 * LEAST_SCALE, scale_error * scales) + of_scales
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


def rotation(head_size: int) -> Float64[Tensor, "head_size head_size"]:
    """vLLM's random Hadamard transform: ``x @ rotation`` is what ``int4_per_token_head`` stores of a row ``x``.

    Signs, then Hadamard's matrix in blocks of the largest power of two that divides ``head_size``, not normalised: the
    rotation times its transpose is that power of two times the identity.
    """
    block = head_size & -head_size
    drawn = torch.full((block,), 0.5, dtype=torch.float32, device="cpu").bernoulli(
        generator=torch.Generator("cpu").manual_seed(0x9E3779B9)
    )
    hadamard = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(hadamard) < block:
        hadamard = torch.cat((hadamard.repeat(1, 2), torch.cat((hadamard, -hadamard), dim=1)))
    blocks = torch.eye(head_size // block, dtype=torch.float64, device="cpu")
    return torch.kron(blocks, (2 * drawn.double() - 1)[:, None] * hadamard)


_SIGNED_E2M1 = (*_E2M1, *(-value for value in _E2M1))
_INTEGERS = tuple(map(float, range(16)))
FORMATS = {
    "int4": PackedFormat(_INTEGERS, 0, "float32", has_zeros=True),
    "int4_rotated": PackedFormat(_INTEGERS, 0, "float32", zeros_in_scales=True, is_rotated=True),
    "int8": PackedFormat((), 0, "float32", dtype="int8"),
    "fp8": PackedFormat((), 0, "float32", dtype="float8_e4m3fn"),
    "fp8_latent": PackedFormat((), 128, "float32", dtype="float8_e4m3fn"),
    "nvfp4": PackedFormat(_SIGNED_E2M1, 16, "float8_e4m3fn", has_global=True),
    "mxfp4": PackedFormat(_SIGNED_E2M1, 32, "uint8"),
}
"""int4 with zero points apart, and as vLLM's ``int4_per_token_head`` has it; 8 bits with a scale for each token and
head, and with one for each 128 numbers of a latent vector; NVIDIA's and the OCP's 4-bit floating-point formats."""

_LATENT = FORMATS["fp8_latent"]


def latent_row_size(rank: int, rope_size: int) -> int:
    """Bytes of a row of DeepSeek's sparse cache: a latent vector in float8, its scales, a rotary part in 16 bits."""
    return rank + 4 * -(-rank // _LATENT.block) + 2 * rope_size


def parts_of_latents(
    rows: UInt8[Tensor, "*rows bytes"], rank: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the float8 numbers, the scales, and the rotary part in ``dtype``, that lie in ``rows``."""
    end = rank + 4 * -(-rank // _LATENT.block)
    latents, scales = rows[..., :rank].view(torch.float8_e4m3fn), rows[..., rank:end].view(torch.float32)
    return latents, scales, rows[..., end:].view(dtype)


def latent_rows(latents: Tensor, scales: Tensor, ropes: Tensor) -> Float64[Tensor, "*rows size"]:
    """Keys of which these are the parts, exactly."""
    return torch.cat((_LATENT.read(latents, scales), ropes.double()), dim=-1)
