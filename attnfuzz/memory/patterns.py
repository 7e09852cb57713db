"""The bit patterns that unread and unwritten memory holds.

*Poison* fills whatever a kernel must not read: NaN, so that one stray read shows in the result. *Pre-fill* is what
outputs and workspaces hold before a kernel writes them: another NaN, with a payload that tells "never written" from
"computed". Each comes in a second, finite version: a result that depends on neither has the same bits under both. The
third is so low that it loses every comparison: a log-sum-exp or a maximum over numbers that were never written holds
the first two as if it had not been written itself, where they outweigh the others, but not the third. The fourth is as
high: whatever a query is, a key of one of the two has a large score.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

Fill = Literal["nan", "finite", "low", "high"]

POISON_BYTES: dict[Fill, int] = {"nan": 0xFF, "finite": 0x3C, "low": 0xF8, "high": 0x78}
"""Repeated over whole buffers. 0xFF is NaN in float16, bfloat16, float32 and float64 and -1 as an integer; 0x3C is a
small positive number in all four (1.06 in float16, 0.0115 in bfloat16 and float32), 0x78 a large one (3.7e4,
2e34), 0xF8 the same below zero."""

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_PREFILL_BITS: dict[Fill, dict[torch.dtype, int]] = {
    "nan": {
        torch.float16: 0x7E5A,
        torch.bfloat16: 0x7FDA,
        torch.float32: 0x7FC5A5A5,
        torch.float64: 0x7FF85A5A5A5A5A5A,
    },
    "finite": {  # about 3.1 in float16, 49 in bfloat16 and float32, 37 in float64
        torch.float16: 0x4242,
        torch.bfloat16: 0x4242,
        torch.float32: 0x42424242,
        torch.float64: 0x4042424242424242,
    },
    "low": {  # about -8.7e3 in float16, -3.8e30 in bfloat16 and float32, -6e232 in float64
        torch.float16: 0xF042,
        torch.bfloat16: 0xF242,
        torch.float32: 0xF2424242,
        torch.float64: 0xF042424242424242,
    },
    "high": {  # the same above zero
        torch.float16: 0x7042,
        torch.bfloat16: 0x7242,
        torch.float32: 0x72424242,
        torch.float64: 0x7042424242424242,
    },
}

_PREFILL_BYTES: dict[Fill, int] = {"nan": 0x7F, "finite": 0x01, "low": 0x81, "high": 0x41}
"""For other dtypes: 0x7F is a NaN in float8_e4m3fn and float8_e5m2 and the largest number of a signed byte."""


def bits(tensor: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """This memory as integers: NaNs with equal payloads compare equal, 0.0 and -0.0 do not.

    Raises `ValueError` for complex128, the one dtype wider than any integer.
    """
    integer = _INTEGER_OF_SIZE.get(tensor.dtype.itemsize)
    if integer is None:
        raise ValueError(f"dtype={tensor.dtype} has {tensor.dtype.itemsize} bytes per element; at most 8 are supported")
    return tensor.view(integer)


def prefill_(tensor: Shaped[Tensor, "*shape"], fill: Fill, *, where: Bool[Tensor, "*shape"] | None = None) -> None:
    """Overwrite every element, or those ``where`` says so, with the pattern of memory that was never written."""
    if tensor.dtype is torch.bool:
        elements, pattern = tensor, int(fill == "nan")
    else:
        elements, pattern = bits(tensor), prefill_bits(tensor.dtype, fill)
    if where is None:
        elements.fill_(pattern)
    else:
        elements.masked_fill_(where, pattern)


def holds_prefill(tensor: Shaped[Tensor, "*shape"], fill: Fill) -> Bool[Tensor, "*shape"]:
    """True at each element that still holds the pattern of `prefill_`."""
    if tensor.dtype is torch.bool:
        return tensor == (fill == "nan")
    return bits(tensor) == prefill_bits(tensor.dtype, fill)


def poison_value(dtype: torch.dtype, fill: Fill) -> float:
    """The number that poisoned memory reads as in `dtype`."""
    pattern = torch.full((dtype.itemsize,), POISON_BYTES[fill], dtype=torch.uint8, device="cpu")
    return float(pattern.view(dtype).item())


def prefill_bits(dtype: torch.dtype, fill: Fill) -> int:
    """The pattern of an element, as `bits` has it."""
    known = _PREFILL_BITS[fill].get(dtype)
    size = dtype.itemsize
    pattern = bytes([_PREFILL_BYTES[fill]]) * size if known is None else known.to_bytes(size, "little")
    return int.from_bytes(pattern, "little", signed=size > 1)
