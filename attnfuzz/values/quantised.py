"""K and V as an 8-bit cache holds them: what the recipes draw, rounded to float8.

The numbers stay in the case's dtype, which holds every float8 number, until they are written to the cache. Rounding is
to nearest, ties to even, and what is too large becomes the largest finite number. Four recipes would lose by that what
they are there for, and draw otherwise:

* ``positions``: the four numbers modulo 16 (float8_e5m2: 8), so that neighbouring tokens still differ.
* ``fine``: bit patterns, so that every exponent and fraction and all subnormal numbers occur. Of K, and of float8_e5m2,
  the largest exponent bit is 0, which keeps numbers below 2; for 0x7F and the like, which are no numbers, there is 0.
* ``small``: subnormal numbers of the format, of up to two units.
* ``large`` is a quarter as large in float8_e4m3fn, whose largest number is 448.

Where q is float16, nothing in the cache stands for more than a float16 holds: it was one before it was cached, and a
kernel may make one of it again.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from attnfuzz.problems.cases import AttentionCase
from attnfuzz.problems.quantised_kv import LARGEST, SMALLEST, KvDtype, QuantisedKv
from attnfuzz.problems.recipes import KeyRecipe, ValueRecipe
from attnfuzz.values.draws import DrawnRecipe, drawn_as
from attnfuzz.values.transfer import on_device

__all__ = ["drawn_for_cache", "quantised_keys", "quantised_needle", "quantised_values", "scales_of"]

_CODES_BELOW = {"float8_e4m3fn": 16, "float8_e5m2": 8}
"""Integers up to these have exact neighbours: 4 and 3 bits of significand."""

_BELOW_TWO = 0xBF
_LARGEST_OF_FLOAT16 = 7168.0
"""In a format of 8 bits; times the largest scale, 8, below 65,504."""


def drawn_for_cache(
    recipe: KeyRecipe | ValueRecipe, dtype: torch.dtype, kv: QuantisedKv | None, exponent: int = 0
) -> tuple[DrawnRecipe, int]:
    """As `drawn_as`, times ``2**exponent``, for K or V in a cache; bit patterns are drawn as they are."""
    if kv is not None and recipe == "fine":
        return "fine8", 0
    if kv is not None and recipe == "small":
        return "integers", round(math.log2(SMALLEST[kv.dtype]))
    kind, own_exponent = drawn_as(recipe, dtype)
    return kind, exponent + own_exponent


def quantised_keys(case: AttentionCase, k: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``k`` as its recipe is drawn, before needles are set, as the cache of ``case`` holds it."""
    if case.kv is None:
        return k
    if case.values.keys == "fine":
        k = _of_bits(k, case.kv.dtype, _BELOW_TWO) * 2.0**case.values.logit_exponent
    return _rounded(k, case.kv.dtype)


def quantised_values(case: AttentionCase, v: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``v`` as its recipe is drawn, as the cache of ``case`` holds it."""
    if case.kv is None:
        return v
    dtype, recipe = case.kv.dtype, case.values.values
    if recipe == "fine":
        return _of_bits(v, dtype, _BELOW_TWO if dtype == "float8_e5m2" else 0xFF)
    if recipe == "positions":
        v = (v - 1) % _CODES_BELOW[dtype] + 1
    elif recipe == "large" and dtype == "float8_e4m3fn":
        v = v / 4
    return _rounded(v, dtype)


def quantised_needle(case: AttentionCase, key: Float[Tensor, " head_size"]) -> Float[Tensor, " head_size"]:
    """The key of a needle, as the cache of ``case`` holds it."""
    return key if case.kv is None else _rounded(key, case.kv.dtype)


def _rounded(numbers: Float[Tensor, "*shape"], dtype: KvDtype) -> Float[Tensor, "*shape"]:
    """To the nearest of ``dtype``, in the dtype they have. torch's versions differ in what they make of larger ones."""
    largest = min(LARGEST[dtype], _LARGEST_OF_FLOAT16) if numbers.dtype == torch.float16 else LARGEST[dtype]
    return numbers.float().clamp(-largest, largest).to(getattr(torch, dtype)).to(numbers.dtype)


def scales_of(case: AttentionCase, device: torch.device | str) -> Float64[Tensor, "2 num_kv_heads"] | None:
    """Those of K and of V; None without an 8-bit cache."""
    if case.kv is None:
        return None
    scales = case.kv.head_scales(case.num_kv_heads, case.values.seed)
    return on_device(torch.tensor(scales, dtype=torch.float64, device="cpu"), device)


def _of_bits(drawn: Float[Tensor, "*shape"], dtype: KvDtype, mask: int) -> Float[Tensor, "*shape"]:
    """What the lowest 8 bits of these integers are in ``dtype``."""
    codes = (drawn.to(torch.int16) & mask).to(torch.uint8)
    found = codes.view(getattr(torch, dtype)).float()
    return found.where(found.isfinite(), 0.0).to(drawn.dtype)
