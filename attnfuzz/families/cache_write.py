"""Writing new tokens into a paged KV cache, quantised or not: vLLM's ``reshape_and_cache_flash`` and its relatives.

Token i of ``key`` and ``value`` goes into slot ``slot_mapping[i]``: page ``slot // block_size``, place
``slot % block_size``. A slot of -1 stands for a padding token of a captured graph, which is written nowhere. Every byte
of the caches that no slot names stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz import Choice, Expected, Integer, Seed, TensorSpec
from attnfuzz.families.formats import FORMATS, rotation

__all__ = ["CacheWrite"]

_FORMATS = {
    "fp8": "float8_e4m3fn",
    "fp8_token": "float8_e4m3fn",
    "int8_token": "int8",
    "int4_token": "uint8",
    "int4_rotated": "uint8",
}
_LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
_INT4 = FORMATS["int4"]
_LEAST_SCALE = 1e-6
"""Scale of a row of zeros, which has none of its own; vLLM's."""
_SCALE_ERROR = 2.0**-21
"""Relative, of a quotient in float32 or of a product with a reciprocal; of a scale that was rounded as well."""
_SUM_ERROR = 2.0**-20
"""Of a sum of up to 256 numbers in float32, against the sum of their sizes."""
_LOW_BITS = 2.0**-19
"""Of a float32 of which the lowest 4 bits hold a zero point."""


class CacheWrite(attnfuzz.Problem):
    """``cache``: "same", as the new tokens are; "fp8", divided by a scale for each tensor, which the kernel is given;
    "fp8_token" and "int8_token", by one for each token and head, ``max |x| / 448`` or ``/ 127``, which it works out and
    stores in ``k_scales`` and ``v_scales``; "int4_token", two codes in a byte (`attnfuzz.families.formats`), with a
    scale, ``(max x - min x) / 15`` where 0 counts as one of the x, and a zero point, ``-min x / scale`` rounded, which
    goes into ``k_zeros`` and ``v_zeros``; "int4_rotated", so of ``x @ rotation`` in the dtype of x. ``strides``: of the
    new tokens, which may be parts of q, k and v side by side. ``cache_strides``: of the caches, which may share pages
    with other layers. ``zeros``: the first token is 0. ``one_sided``: all numbers of the second token, rotated if they
    are to be, lie on one side of 0.
    """

    num_tokens = Integer(1, 24)
    skipped = Integer(0, 3)
    num_kv_heads = Choice((1, 2, 3, 8))
    head_size = Choice((16, 64, 80, 128))
    block_size = Choice((1, 5, 16))
    spare_blocks = Integer(0, 2)
    layout = Choice(("NHD", "HND"))
    cache = Choice(("same", "fp8", "fp8_token", "int8_token", "int4_token", "int4_rotated"))
    strides = Choice(("contiguous", "outer_gap"))
    cache_strides = Choice(("contiguous", "outer_gap"))
    zeros = Choice((False, True))
    one_sided = Choice((False, True))
    dtype = Choice(("float16", "bfloat16"))
    seed = Seed()

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """Caches ``[blocks, block_size, num_kv_heads, head_size]``, or with places and heads exchanged."""
        rows, heads = case.num_tokens + case.skipped, case.num_kv_heads
        blocks = -(-case.num_tokens // case.block_size) + case.spare_blocks
        new = TensorSpec((rows, heads, case.head_size), case.dtype, "input", case.strides, ("token", "head", "dim"))
        if case.layout == "NHD":
            shape, axes = (blocks, case.block_size, heads, case.head_size), ("block", "offset", "head", "dim")
        else:
            shape, axes = (blocks, heads, case.block_size, case.head_size), ("block", "head", "offset", "dim")
        of_slots: Any = {"named_by": "slot_mapping", "places": case.block_size}
        dtype, packed = _FORMATS.get(case.cache, case.dtype), case.cache.startswith("int4")
        row = (case.head_size // 2,) if packed else shape[3:]
        cache = TensorSpec((*shape[:3], *row), dtype, "in_place", case.cache_strides, axes, **of_slots)
        found = {"key": new, "value": new, "k_cache": cache, "v_cache": cache}
        found["slot_mapping"] = TensorSpec((rows,), "int64")
        if case.cache == "fp8":
            found |= dict.fromkeys(("k_scale", "v_scale"), TensorSpec((1,), "float32"))
        elif case.cache != "same":
            scales = TensorSpec(shape[:3], "float32", "in_place", axes=axes[:3], **of_slots)
            found |= dict.fromkeys(("k_scales", "v_scales"), scales)
            found |= dict.fromkeys(("k_zeros", "v_zeros") if packed else (), scales._replace(dtype="uint8"))
        return found

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """Slots are a permutation, so that no two tokens have the same."""
        generator = torch.Generator("cpu").manual_seed(case.seed)
        for name in ("key", "value"):
            tensors[name].copy_(attnfuzz.numbers(tuple(tensors[name].shape), seed=case.seed, name=name))
            if case.one_sided:
                second = tensors[name][min(1, len(tensors[name]) - 1)]
                new = 0.5 + second.double().abs()
                if case.cache == "int4_rotated":
                    turn = rotation(case.head_size)
                    new = new @ turn.mT / turn[0].square().sum()
                second.copy_(new)
            if case.zeros:
                tensors[name][0] = 0
        slots = tensors["k_cache"].shape[0] * case.block_size
        order = torch.randperm(slots, generator=generator, device="cpu", dtype=torch.int64)[: case.num_tokens]
        rows = len(tensors["slot_mapping"])
        places = torch.randperm(rows, generator=generator, device="cpu", dtype=torch.int64)[: case.num_tokens]
        tensors["slot_mapping"].fill_(-1)
        tensors["slot_mapping"][places] = order
        if case.cache == "fp8":
            tensors["k_scale"].fill_(0.03)
            tensors["v_scale"].fill_(0.5)

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """The right cache; for quantised numbers, those before they are rounded, and as their bound that rounding."""
        found = {}
        for name, cache, scale in (("key", "k_cache", "k_scale"), ("value", "v_cache", "v_scale")):
            new = tensors[name].double()
            if case.cache == "same":
                found[cache] = _scattered(case, tensors, new, cache, torch.zeros_like(new))
                continue
            if case.cache.startswith("int4"):
                found |= _in_four_bits(case, tensors, new, name[0])
                continue
            kind = _FORMATS[case.cache]
            if case.cache == "fp8":
                scales = tensors[scale].double().expand(new.shape[:2])
            else:
                scales = new.abs().amax(-1).div(_LARGEST[kind])
                loose = torch.where(scales < _LEAST_SCALE, 2 * _LEAST_SCALE, _SCALE_ERROR * scales)
                found[f"{scale}s"] = _scattered(case, tensors, scales, f"{scale}s", loose)
            quotient = new / scales.clamp(min=_LEAST_SCALE)[..., None]
            found[cache] = _scattered(case, tensors, quotient, cache, attnfuzz.rounding(quotient, kind))
        return found

    def where_is(self, case: Any, name: str, index: tuple[int, ...]) -> str:
        """Which slot it is, of a cache."""
        if name not in ("k_cache", "v_cache", "k_scales", "v_scales", "k_zeros", "v_zeros"):
            return ""
        block, offset = index[0], index[1 if case.layout == "NHD" else 2]
        return f"slot {block * case.block_size + offset}"


def _in_four_bits(case: Any, tensors: Mapping[str, Tensor], new: Tensor, name: str) -> dict[str, Expected]:
    """Scales, zero points and bytes; where rounding is a near thing, both numbers and what lies between."""
    error, of_scale = torch.zeros_like(new), _SCALE_ERROR
    if case.cache == "int4_rotated":
        turn = rotation(case.head_size)
        error, new, of_scale = new.abs() @ turn.abs() * _SUM_ERROR, new @ turn, _SCALE_ERROR + _LOW_BITS
        error = error + attnfuzz.rounding(new, case.dtype)
    least, worst = new.amin(-1).clamp(max=0), error.amax(-1)
    scales = (new.amax(-1).clamp(min=0) - least).div(15).clamp(min=_LEAST_SCALE)
    loose = torch.where(scales <= _LEAST_SCALE, 2 * _LEAST_SCALE, of_scale * scales) + worst * 2 / 15
    low, high = _rounded(-least / scales, 1.0, worst / scales)
    quotient = new / scales[..., None]
    off = (error + quotient.abs() * worst[..., None] * 2 / 15) / scales[..., None]
    codes = (_rounded(quotient + zero[..., None], quotient.abs() + 16, off)[i] for i, zero in enumerate((low, high)))
    lowest, highest = (_INT4.packed(part.to(torch.uint8)).double() for part in codes)
    return {
        f"{name}_scales": _scattered(case, tensors, scales, f"{name}_scales", loose),
        f"{name}_zeros": _scattered(case, tensors, (low + high) / 2, f"{name}_zeros", (high - low) / 2),
        f"{name}_cache": _scattered(case, tensors, (lowest + highest) / 2, f"{name}_cache", (highest - lowest) / 2),
    }


def _rounded(number: Tensor, size: Tensor | float, off: Tensor) -> tuple[Tensor, Tensor]:
    """The codes that a number may become which was worked out in float32 of parts as large as ``size``, and is ``off``
    by up to so much before that.
    """
    error = _SCALE_ERROR * (number.abs() + size) + off
    return (number - error + 0.5).floor().clamp(0, 15), (number + error + 0.5).floor().clamp(0, 15)


def _scattered(case: Any, tensors: Mapping[str, Tensor], new: Tensor, into: str, bound: Tensor) -> Expected:
    """``new`` and its ``bound``, by token, at their slots."""
    shape = tuple(tensors[into].shape)
    value, bounds = (torch.zeros(shape, dtype=torch.float64, device="cpu") for _ in range(2))
    where = torch.zeros(shape, dtype=torch.bool, device="cpu")
    is_written = tensors["slot_mapping"] >= 0
    slots = tensors["slot_mapping"][is_written]
    block, offset = slots // case.block_size, slots % case.block_size
    by_token = (part if case.layout == "NHD" else part.transpose(1, 2) for part in (value, bounds, where))
    for part, given in zip(by_token, (new, bound, torch.ones_like(new, dtype=torch.bool)), strict=True):
        part[block, offset] = given[is_written]
    return Expected(value, where, bounds)
