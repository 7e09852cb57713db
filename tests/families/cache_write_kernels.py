"""Kernels of `attnfuzz.families.CacheWrite` with a bug each, of the kinds that engines' writers had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import attnfuzz
from attnfuzz.families import CacheWrite
from attnfuzz.families.cache_write import one_token_is_kept
from attnfuzz.families.cache_write_kernels import cache_write_eager
from attnfuzz.families.formats import rotation

__all__ = ["one_token_is_kept"]


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
        rows = new[: len(slots)] if name == "v" and bug == "v_counted" else new[is_written]
        cache = getattr(inputs, f"{name}_cache")
        places_first = cache if inputs.layout == "NHD" else cache.transpose(1, 2)
        size = 16 if bug == "page_size" else places_first.shape[1]
        at = slots // size % len(places_first), slots % size % places_first.shape[1]
        if inputs.cache == "nvfp4":
            _write_nvfp4(inputs, name, places_first, rows.float(), at, bug)
            continue
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


def _write_nvfp4(inputs: Any, name: str, cache: Any, rows: Any, at: Any, bug: str) -> None:
    of_all = getattr(inputs, "k_global" if bug == "global_of_k" else f"{name}_global")
    of_all = 1 / of_all if bug == "by_global" else of_all
    blocks = rows.view(*rows.shape[:2], -1, 16)
    largest = blocks.abs().amax(-1)
    if bug == "blocks_of_32":  # the second of two blocks has the scale of the first
        largest = largest[..., torch.arange(largest.shape[-1]) // 2 * 2]
    if bug == "one_scale":
        largest = largest.amax(-1, keepdim=True).expand_as(largest)
    exact = largest / 6 / of_all
    stored = exact.clamp(max=448).to(torch.float8_e4m3fn)
    factors = (exact if bug == "unrounded" else stored.float()) * of_all
    numbers = (blocks / factors[..., None].clamp(min=1e-30)).flatten(-2)
    ties = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), device=numbers.device)
    codes = torch.bucketize(numbers.abs(), ties) + (0 if bug == "unsigned" else 8) * (numbers < 0)
    first, second = (codes[..., ::2], codes[..., 1::2])[:: -1 if bug == "high_first" else 1]
    cache[at] = (first | second << 4).to(torch.uint8)
    scales = getattr(inputs, f"{name}_scales").view(torch.uint8)
    scales = scales if inputs.layout == "NHD" else scales.transpose(1, 2)
    if bug != "swizzled" or name == "k" or scales.shape[1] % 4 or scales.shape[3] % 4:
        scales[at] = stored.view(torch.uint8)
        return
    place, scale = at[1][:, None], torch.arange(scales.shape[3])[None]  # 4 tokens and 4 scales change places
    to = at[0][:, None], place // 4 * 4 + scale % 4, scale // 4 * 4 + place % 4
    scales.transpose(2, 3)[to] = stored.transpose(1, 2).contiguous().view(torch.uint8)


def _rotate(inputs: Any, bug: str) -> None:
    """The right writer, given other positions, pairs, angles or numbers."""
    rotary, table, positions = inputs.rotary, inputs.cos_sin, inputs.positions
    cos, sin = table.chunk(2, -1)
    if bug == "by_slot":
        positions = inputs.slot_mapping % len(table)
    if bug == "pairs":
        rotary = {"neox": "gptj", "gptj": "neox"}[rotary]
    if bug == "backwards":
        table = torch.cat((cos, -sin), -1)
    if bug == "sines_first":
        table = torch.cat((sin, cos), -1)
    given = {**vars(inputs), "rotary": rotary, "cos_sin": table, "positions": positions}
    cache_write_eager(SimpleNamespace(**given))
    if bug == "v_too":
        of_v = {name: part for name, part in given.items() if name.startswith("v_")}
        as_k, aside = ({f"k{name[1:]}": part for name, part in of_v.items()}, {n: p.clone() for n, p in of_v.items()})
        cache_write_eager(SimpleNamespace(**{**given, **as_k, **aside, "key": inputs.value}))


def _repeat(inputs: Any, bug: str) -> None:
    """The right writer, then the first token of each slot over a part of what the last one has left."""
    cache_write_eager(inputs)
    kept = {name: part.clone() for name, part in vars(inputs).items() if name.startswith(("k_", "v_"))}
    slots = inputs.slot_mapping.flip(0)
    given = {**vars(inputs), "slot_mapping": slots, "key": inputs.key.flip(0), "value": inputs.value.flip(0)}
    if inputs.rotary != "none":
        given["positions"] = inputs.positions.flip(0)
    cache_write_eager(SimpleNamespace(**given))
    for name in ("k", "v"):
        last, first = kept[f"{name}_cache"], getattr(inputs, f"{name}_cache")
        start = 0 if bug == "other_scale" else last.shape[-1] // 2 * last.element_size()
        first.view(torch.uint8)[..., start:] = last.view(torch.uint8)[..., start:]


PLANTED = {
    "padding": "a padding token is written to the last slot",
    "v_counted": "rows of V are counted without padding tokens",
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
    "by_slot": "K is rotated by the slot, not by the position",
    "pairs": "halves are paired in place of neighbours, or neighbours in place of halves",
    "backwards": "K is rotated the other way",
    "sines_first": "sines are taken for cosines",
    "v_too": "V is rotated as well",
    "global_of_k": "scales of V are divided by the scale of all of K",
    "by_global": "the scale of all numbers is taken for its reciprocal",
    "blocks_of_32": "two blocks have one scale",
    "one_scale": "all blocks of a head have one scale",
    "unrounded": "numbers are divided by the scale of their block before it is rounded",
    "unsigned": "signs are lost",
    "swizzled": "scales of V change places in squares of four tokens and four blocks, for another reader",
    "mixture": "of tokens that have one slot, halves of two are kept",
    "other_scale": "of tokens that have one slot, one has the codes and another the scale",
}
_REPEATS = {"repeats": attnfuzz.Choice(("other", "same", "none")), "rotary": attnfuzz.Choice(("none", "neox"))}
_SCALED = attnfuzz.Choice(("fp8_token", "int8_token", "int4_token", "nvfp4"))
_TURNS = CacheWrite(rotary=attnfuzz.Choice(("neox", "gptj")))
_OTHERS = {
    **dict.fromkeys(("by_slot", "pairs", "backwards", "sines_first", "v_too"), (_rotate, _TURNS)),
    "zeros": (_write, CacheWrite(cache=attnfuzz.Choice(("fp8_token", "int8_token")))),
    "mixture": (_repeat, CacheWrite(**_REPEATS)),
    "other_scale": (_repeat, CacheWrite(**_REPEATS, cache=_SCALED)),
    **dict.fromkeys(
        ("global_of_k", "by_global", "blocks_of_32", "one_scale", "unrounded", "unsigned", "swizzled"),
        (_write, CacheWrite(cache=attnfuzz.Choice(("nvfp4",)))),
    ),
}


def _planted(bug: str) -> Any:
    wrong, problem = _OTHERS.get(bug, (_write, CacheWrite()))

    def write(inputs: Any) -> None:
        wrong(inputs, bug)

    write.__name__ = write.__qualname__ = bug
    return attnfuzz.kernel(problem)(write)


@attnfuzz.kernel(CacheWrite())
def right(inputs: Any) -> None:
    _write(inputs)


for _bug in PLANTED:
    globals()[_bug] = _planted(_bug)
