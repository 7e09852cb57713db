"""A cache that holds K and V as 8-bit floating-point numbers, and the scales that make K and V of them.

A case that says nothing of it is plain: its cache has the dtype of q. Otherwise a cached number ``x`` of KV head ``h``
stands for ``x · k_scale[h]`` or ``x · v_scale[h]``, exactly; ``q`` and ``out`` keep the case's dtype. vLLM and
FlashInfer hold one scale for a whole cache, in a tensor of one element; per-head scales are what finer calibration
gives. Both formats are those of the OCP 8-bit floating point specification (and of Micikevicius et al., arXiv
2209.05433): ``float8_e4m3fn`` has 4 exponent and 3 fraction bits and no infinity, ``float8_e5m2`` 5 and 2.

Torch-free.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import msgspec

from attnfuzz.problems.hashing import fold, stream_key

KvDtype = Literal["float8_e4m3fn", "float8_e5m2"]
KvGranularity = Literal["tensor", "head"]
KvScaleRecipe = Literal["one", "powers", "scattered", "large", "wide"]

KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)
KV_GRANULARITIES: tuple[KvGranularity, ...] = get_args(KvGranularity)
KV_SCALE_RECIPES: tuple[KvScaleRecipe, ...] = get_args(KvScaleRecipe)
KV_SCALE_TENSORS = ("k_scale", "v_scale")

LARGEST: dict[KvDtype, float] = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
SMALLEST: dict[KvDtype, float] = {"float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16}

LARGE_K_SCALE = 2.0**15
"""Times 2 it is more than float16 can hold: a kernel that multiplies it into a query keeps that in float32."""
_K_SCALES, _V_SCALES = 12, 13  # hash streams of a case's seed, beside those of `attnfuzz.values.draws.Stream`
_EXPONENTS = (-3, -2, -1, 1, 2, 3)  # not 0, so that no scale can be left out unseen
_WIDE_EXPONENTS = tuple(exponent for exponent in range(-11, 10) if exponent)
_FRACTION_BITS = 23


class QuantisedKv(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The 8-bit cache that a case asks for. ``per``: one scale for all of K and one for V, or one for each KV head of
    each.

    ``scales``: all 1 (``"one"``), powers of two other than 1 (``"powers"``) or float32 numbers with all bits of their
    significand (``"scattered"``); these two differ between K and V and from head to head. ``"large"``: K's are 2^15, so
    that most queries times them are beyond float16, and V's powers of two. ``"wide"``: as ``"scattered"``, from 2^-12
    to 2^9: a tensor whose largest number is 1 has one near 2^-9, and a query times that is less than float16 is for.
    """

    dtype: KvDtype
    per: KvGranularity = "tensor"
    scales: KvScaleRecipe = "one"

    def head_scales(self, num_kv_heads: int, seed: int) -> KvScales:
        """The scales of a case with this ``seed``; per tensor, all heads have the same."""
        return _head_scales(self, num_kv_heads, seed)


class KvScales(NamedTuple):
    """One for each KV head: float32 numbers from 1/16 to 8, or 2^15, or from 2^-12 to 2^9."""

    k: tuple[float, ...]
    v: tuple[float, ...]


@lru_cache(maxsize=1024)
def _head_scales(kv: QuantisedKv, num_kv_heads: int, seed: int) -> KvScales:
    drawn = 1 if kv.per == "tensor" else num_kv_heads
    k, v = (tuple(_scale(kv.scales, seed, stream, i) for i in range(drawn)) for stream in (_K_SCALES, _V_SCALES))
    return KvScales(k * (num_kv_heads // drawn), v * (num_kv_heads // drawn))


def smallest_magnitudes(kv: QuantisedKv, scales: KvScales) -> tuple[float, float]:
    """The smallest numbers other than 0 that an element of K and of V can stand for."""
    return SMALLEST[kv.dtype] * min(scales.k), SMALLEST[kv.dtype] * min(scales.v)


def _scale(recipe: KvScaleRecipe, seed: int, stream: int, i: int) -> float:
    if recipe == "one":
        return 1.0
    if recipe == "large" and stream == _K_SCALES:
        return LARGE_K_SCALE
    word = fold(stream_key(seed, stream), i)
    exponents = _WIDE_EXPONENTS if recipe == "wide" else _EXPONENTS
    exponent = exponents[(word >> 24) % len(exponents)]
    if recipe in ("powers", "large"):
        return math.ldexp(1.0, exponent)
    return math.ldexp((1 << _FRACTION_BITS) + (word & ((1 << _FRACTION_BITS) - 1)), exponent - 1 - _FRACTION_BITS)
