"""Formats of caches with several numbers in a byte: what readers, writers and references say alike of them.

A number is the value of its code times the scale of its block, times one of the whole tensor where a format has that.
Two codes lie in a byte, the first in its lower half, as vLLM, FlashInfer and the OCP's microscaling formats have it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float64, UInt8
from torch import Tensor

__all__ = ["FORMATS", "PackedFormat"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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


_SIGNED_E2M1 = (*_E2M1, *(-value for value in _E2M1))
FORMATS = {
    "int4": PackedFormat(tuple(map(float, range(16))), 0, "float32", has_zeros=True),
    "nvfp4": PackedFormat(_SIGNED_E2M1, 16, "float8_e4m3fn", has_global=True),
    "mxfp4": PackedFormat(_SIGNED_E2M1, 32, "uint8"),
}
"""int4 as in vLLM's ``int4_per_token_head``; NVIDIA's and the OCP's 4-bit floating-point formats."""
