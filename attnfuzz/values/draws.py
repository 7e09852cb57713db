"""Integer draws from hash words, and their exact conversion to floating point."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, cast

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from attnfuzz.problems.hashing import fold
from attnfuzz.problems.recipes import KeyRecipe, ValueRecipe
from attnfuzz.problems.supports import MAX_HEAD_SIZE

__all__ = ["NORMAL_EXPONENT", "DrawnRecipe", "Stream", "draw", "drawn_as", "element_words", "exact", "fine_bits"]

NORMAL_EXPONENT = -5
"""The "normal" recipe draws integers of standard deviation 36.9; times 2^-5 it is 1.15."""

DrawnRecipe = Literal["integers", "normal", "large", "small", "fine8", "fine11", "fine24"]
"""Recipes that draw every element on its own; "fine" with so many bits."""

_SUBNORMAL_EXPONENT = {torch.float16: -24, torch.bfloat16: -133}
"""Of the smallest number above 0. Float32 has smaller ones still, but none that is normal is below 2^-126 either."""

_FINE_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Of the significand of each dtype (IEEE 754; bfloat16 is the upper half of float32)."""


class Stream(IntEnum):
    """Hash streams of one seed. Numbers are part of saved cases: never reuse or renumber.

    10 and 11 are taken by `attnfuzz.problems.variants`, 12 and 13 by `attnfuzz.problems.quantised_kv`: neither may load
    torch.
    """

    Q = 1
    K = 2
    V = 3
    SIGN = 4
    PREFIX_OUTPUT = 5
    SUFFIX_OUTPUT = 6
    PREFIX_LSE = 7
    SUFFIX_LSE = 8
    COMMON_LSE = 9


def element_words(
    states: Int64[Tensor, " rows"], num_heads: int, head_size: int
) -> Int64[Tensor, "rows num_heads head_size"]:
    """One hash word per element of every row's ``[num_heads, head_size]`` vectors."""
    heads = torch.arange(num_heads, device=states.device) * MAX_HEAD_SIZE
    dims = torch.arange(head_size, device=states.device)
    words: Tensor = fold(states[:, None, None], heads[:, None] + dims)
    return words


def drawn_as(recipe: KeyRecipe | ValueRecipe, dtype: torch.dtype) -> tuple[DrawnRecipe, int]:
    """What to draw for ``recipe``, and the power of 2 to multiply it with."""
    if recipe == "fine":
        bits = _FINE_BITS[dtype]
        return cast(DrawnRecipe, f"fine{bits}"), 2 - bits
    if recipe == "small":
        exponent = _SUBNORMAL_EXPONENT.get(dtype, _SUBNORMAL_EXPONENT[torch.bfloat16])
        return "fine11" if dtype == torch.float16 else "small", exponent
    return cast(DrawnRecipe, recipe), NORMAL_EXPONENT if recipe == "normal" else 0


def fine_bits(recipe: str) -> int | None:
    """How many bits the numbers of a "fine" recipe have; None for another one."""
    return int(recipe.removeprefix("fine")) if recipe.startswith("fine") else None


def draw(words: Int64[Tensor, "*shape"], recipe: DrawnRecipe) -> Int64[Tensor, "*shape"]:
    """Integers for the recipes that draw every element on its own.

    "normal" is the sum of four uniform 6-bit integers, centred (Irwin-Hall): -126 to 126. "large" has magnitudes
    512, 516, ... 1020, which bfloat16 holds; "small" up to 127 times a power of two up to 2^15. "fine" ones use all
    bits of a significand, the sign included: uniform.
    """
    if (bits := fine_bits(recipe)) is not None:
        return (words & ((1 << bits) - 1)) - (1 << (bits - 1))
    if recipe == "integers":
        return words % 5 - 2
    if recipe == "large":
        magnitudes = ((words & 127) + 128) * 4
        return torch.where(words & 128 == 0, magnitudes, -magnitudes)
    if recipe == "small":
        magnitudes = (words & 127) << (words >> 7 & 15)
        return torch.where(words & 2048 == 0, magnitudes, -magnitudes)
    pairs = (words & 0x3F03F) + (words >> 6 & 0x3F03F)  # two sums of two, 12 bits apart
    return (pairs & 127) + (pairs >> 12) - 126


def exact(integers: Int[Tensor, "*shape"], dtype: torch.dtype, exponent: int = 0) -> Float[Tensor, "*shape"]:
    """``integers * 2**exponent`` in ``dtype``; the recipes only pass what ``dtype`` holds exactly."""
    floats = integers.to(dtype)
    return floats if exponent == 0 else floats.mul_(2.0**exponent)
