"""Kernels of `attnfuzz.families.CacheWrite` with a bug each, of the kinds that engines' writers had."""

from __future__ import annotations

from typing import Any

import torch

import attnfuzz
from attnfuzz.families import CacheWrite
from attnfuzz.families.formats import rotation


def _write(inputs: Any, bug: str = "") -> None:
    is_written = inputs.slot_mapping >= 0
    if bug == "padding":
        is_written = torch.ones_like(is_written)
    slots = inputs.slot_mapping[is_written]
    for name in ("k", "v"):
        new = inputs.key if name == "k" or bug == "k_twice" else inputs.value
        if bug == "packed":
            new = new.as_strided(new.shape, (new.shape[1] * new.shape[2], new.shape[2], 1))
        if inputs.cache == "int4_rotated":
            turn = rotation(new.shape[-1]).to(new.device, torch.float32)
            turn = turn.abs() if bug == "no_signs" else turn
            new = (new.float() @ turn).to(new.dtype)
        rows = new[is_written]
        cache = getattr(inputs, f"{name}_cache")
        places_first = cache if inputs.layout == "NHD" else cache.transpose(1, 2)
        size = 16 if bug == "page_size" else places_first.shape[1]
        at = slots // size % len(places_first), slots % size % places_first.shape[1]
        if inputs.cache.startswith("int4"):
            _write_four_bits(inputs, name, places_first, rows.float(), at, bug)
            continue
        if inputs.cache != "same":
            largest = 127.0 if inputs.cache == "int8_token" else 448.0
            if inputs.cache == "fp8":
                factors = inputs.v_scale if name == "v" and bug != "k_scale" else inputs.k_scale
                rows = rows.float() * factors if bug == "multiplied" else rows.float() / factors
            else:
                size_of = rows.float().abs()
                factors = size_of.amax((1, 2), keepdim=True)[..., 0] if bug == "token" else size_of.amax(-1)
                factors = (factors / largest).clamp(min=0.0 if bug == "zeros" else 1e-6).expand(rows.shape[:2])
                scales = getattr(inputs, f"{name}_scales")
                (scales if inputs.layout == "NHD" else scales.transpose(1, 2))[at] = factors
                rows = rows.float() / factors[..., None]
            rows = rows.clamp(-largest, largest)
            if inputs.cache == "int8_token":
                rows = rows.trunc() if bug == "cut" else rows.round()
            places_first.view(torch.uint8)[at] = rows.to(cache.dtype).view(torch.uint8)
            continue
        width = rows.shape[-1] - rows.shape[-1] % 64 if bug == "tile" and rows.shape[-1] > 64 else rows.shape[-1]
        places_first[*at, :, :width] = rows[..., :width]


def _write_four_bits(inputs: Any, name: str, cache: Any, rows: Any, at: Any, bug: str) -> None:
    least, most = rows.amin(-1), rows.amax(-1)
    if bug != "one_sided":
        least, most = least.clamp(max=0), most.clamp(min=0)
    factors = ((most - least) / (16 if bug == "sixteenths" else 15)).clamp(min=1e-6)
    zero = (-least / factors).add(0.0 if bug == "zero_cut" else 0.5).floor().clamp(0, 15)
    codes = rows / factors[..., None] + (8 if bug == "symmetric" else zero[..., None])
    codes = codes.add(0.0 if bug == "cut" else 0.5).floor()
    codes = codes.clamp(0, 15).to(torch.uint8)
    for what, new in (("scales", factors), ("zeros", zero.to(torch.uint8))):
        into = getattr(inputs, f"{name}_{what}")
        (into if inputs.layout == "NHD" else into.transpose(1, 2))[at] = new
    first, second = (codes[..., ::2], codes[..., 1::2])[:: -1 if bug == "high_first" else 1]
    cache[at] = first | second << 4


PLANTED = {
    "padding": "a padding token is written to the last slot",
    "k_twice": "K goes into both caches",
    "packed": "the new tokens are taken for contiguous",
    "page_size": "pages are taken to have 16 tokens",
    "k_scale": "V is divided by the scale of K",
    "multiplied": "the scale is multiplied with",
    "token": "one scale for all heads of a token",
    "cut": "int8 numbers are cut off",
    "zeros": "a row of zeros is divided by zero",
    "high_first": "the first of two codes goes into the upper half of a byte",
    "sixteenths": "the range of a row is divided by 16, not by 15",
    "symmetric": "codes are written as if the zero point were 8",
    "zero_cut": "a zero point is cut off, not rounded",
    "no_signs": "rows are rotated without their signs",
    "one_sided": "the range of a row need not hold 0, and its zero point is cut to 0 to 15",
    "tile": "the last, partial tile of a head is left out",
}


def _planted(bug: str) -> Any:
    def write(inputs: Any) -> None:
        _write(inputs, bug)

    write.__name__ = write.__qualname__ = bug
    return attnfuzz.kernel(CacheWrite())(write)


@attnfuzz.kernel(CacheWrite())
def right(inputs: Any) -> None:
    _write(inputs)


for _bug in PLANTED:
    globals()[_bug] = _planted(_bug)
