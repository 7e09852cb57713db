"""Right kernels of `attnfuzz.families.CacheWrite`: the bundled one in Triton, and the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families.cache_write import CacheWrite
from attnfuzz.families.cache_write import one_token_is_kept as one_token_is_kept
from attnfuzz.families.formats import rotation
from attnfuzz.kernels.cache import launch

_ROTARY = attnfuzz.Choice(("none", "neox", "gptj"))
_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class _Part(NamedTuple):
    """The part of K or of V that is written, places of a page before heads."""

    new: Tensor
    cache: Tensor
    scale: Tensor | None
    zeros: Tensor | None
    of_all: Tensor | None


@attnfuzz.kernel(CacheWrite(rotary=_ROTARY))
def cache_write(inputs: Any) -> None:
    """``launch.cache_write``, once for K and once for V."""
    rotary = None
    if inputs.rotary != "none":
        rotary = launch.Rotary(inputs.cos_sin, inputs.positions, inputs.rotary == "neox")
    k, v = _parts(inputs)
    if inputs.cache == "int4_rotated":
        key = _rotated(inputs, k.new.float(), inputs.cos_sin[inputs.positions][:, None]) if rotary else k.new
        k, v, rotary = k._replace(new=_turned(key, k.new.dtype)), v._replace(new=_turned(v.new, v.new.dtype)), None
    launch.cache_write(k.new, k.cache, inputs.slot_mapping, k.scale, k.zeros, k.of_all, rotary)
    launch.cache_write(v.new, v.cache, inputs.slot_mapping, v.scale, v.zeros, v.of_all)


@attnfuzz.kernel(CacheWrite(rotary=_ROTARY, repeats=attnfuzz.Choice(("none", "same", "other"))))
def cache_write_eager(inputs: Any) -> None:
    """By indexing; of tokens that have one slot, the last."""
    written = _last_ones(inputs.slot_mapping)
    slots = inputs.slot_mapping[written]
    for name, (new, cache, scale, zeros, of_all) in zip("kv", _parts(inputs), strict=True):
        rows, at = new[written], (slots // cache.shape[1], slots % cache.shape[1])
        if name == "k" and inputs.rotary != "none":
            rows = _rotated(inputs, rows.float(), inputs.cos_sin[inputs.positions[written]][:, None])
        if inputs.cache == "int4_rotated":
            rows = _turned(rows, new.dtype)
        if scale is None:
            cache[at] = rows.to(cache.dtype)
            continue
        rows = rows.float()
        if zeros is not None:
            least = rows.amin(-1).clamp(max=0)
            scale[at] = factors = ((rows.amax(-1).clamp(min=0) - least) / 15).clamp(min=1e-6)
            zeros[at] = zero = (-least / factors).add(0.5).floor().clamp(0, 15).to(torch.uint8)
            codes = (rows / factors[..., None] + zero[..., None]).add(0.5).floor().clamp(0, 15).to(torch.uint8)
            cache[at] = codes[..., ::2] | codes[..., 1::2] << 4
            continue
        if of_all is not None:
            blocks = rows.view(*rows.shape[:2], -1, 16)
            stored = (blocks.abs().amax(-1) / 6 / of_all).clamp(max=448).to(torch.float8_e4m3fn)
            scale.view(torch.uint8)[at] = stored.view(torch.uint8)
            quotient = (blocks / (stored.float() * of_all)[..., None].clamp(min=1e-30)).flatten(-2)
            ties = torch.tensor(_TIES, dtype=torch.float32, device=quotient.device)
            codes = torch.bucketize(quotient.abs(), ties) + 8 * (quotient < 0)
            cache[at] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
            continue
        largest, factors = launch.LARGEST[cache.dtype], scale
        if scale.dim() > 1:
            scale[at] = of_heads = (rows.abs().amax(-1) / largest).clamp(min=1e-6)
            factors = of_heads[..., None]
        rows = (rows / factors).clamp(-largest, largest)
        rows = rows.round() if cache.dtype == torch.int8 else rows
        cache.view(torch.uint8)[at] = rows.to(cache.dtype).view(torch.uint8)  # torch has no indexed store of float8


def _last_ones(slots: Tensor) -> Tensor:
    """The tokens that name a slot as the last ones; torch leaves open which is kept of several at one index."""
    tokens = torch.arange(len(slots), device=slots.device)
    names_later = (slots[:, None] == slots[None, :]) & (tokens[:, None] < tokens[None, :])
    return ((slots >= 0) & ~names_later.any(1)).nonzero().flatten()


def _turned(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows.float() @ rotation(rows.shape[-1]).to(rows.device, torch.float32)).to(dtype)


def _rotated(inputs: Any, rows: Tensor, table: Tensor) -> Tensor:
    size = table.shape[-1]
    cos, sin = table.chunk(2, -1)
    if inputs.rotary == "neox":
        x, y = rows[..., :size].chunk(2, -1)
        turned = torch.cat((x * cos - y * sin, y * cos + x * sin), -1)
    else:
        x, y = rows[..., 0:size:2], rows[..., 1:size:2]
        turned = torch.stack((x * cos - y * sin, y * cos + x * sin), -1).flatten(-2)
    return torch.cat((turned, rows[..., size:]), -1)


def _parts(inputs: Any) -> Iterator[_Part]:
    """One part of K and one of V."""
    for name, new in (("k", inputs.key), ("v", inputs.value)):
        scale = getattr(inputs, f"{name}_scales", getattr(inputs, f"{name}_scale", None))
        parts = [getattr(inputs, f"{name}_cache"), scale, getattr(inputs, f"{name}_zeros", None)]
        if inputs.layout == "HND":
            parts = [part if part is None or part.dim() == 1 else part.transpose(1, 2) for part in parts]
        yield _Part(new, parts[0], parts[1], parts[2], getattr(inputs, f"{name}_global", None))
