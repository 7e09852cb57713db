"""Right kernels of `attnfuzz.families.CacheWrite`: the bundled one in Triton, and the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families.cache_write import CacheWrite
from attnfuzz.families.formats import rotation
from attnfuzz.kernels.cache import launch

__all__ = ["cache_write", "cache_write_eager"]


@attnfuzz.kernel(CacheWrite())
def cache_write(inputs: Any) -> None:
    """``launch.cache_write``, once for K and once for V."""
    for new, cache, scale, zeros in _pairs(inputs):
        launch.cache_write(new, cache, inputs.slot_mapping, scale, zeros)


@attnfuzz.kernel(CacheWrite())
def cache_write_eager(inputs: Any) -> None:
    """By indexing."""
    is_written = inputs.slot_mapping >= 0
    slots = inputs.slot_mapping[is_written]
    for new, cache, scale, zeros in _pairs(inputs):
        rows, at = new[is_written], (slots // cache.shape[1], slots % cache.shape[1])
        if scale is None:
            cache[at] = rows
            continue
        if zeros is not None and scale is not None:
            rows = rows.float()
            least = rows.amin(-1).clamp(max=0)
            scale[at] = factors = ((rows.amax(-1).clamp(min=0) - least) / 15).clamp(min=1e-6)
            zeros[at] = zero = (-least / factors).add(0.5).floor().clamp(0, 15).to(torch.uint8)
            codes = (rows / factors[..., None] + zero[..., None]).add(0.5).floor().clamp(0, 15).to(torch.uint8)
            cache[at] = codes[..., ::2] | codes[..., 1::2] << 4
            continue
        largest, factors = launch.LARGEST[cache.dtype], scale
        if scale.dim() > 1:
            scale[at] = of_heads = (rows.float().abs().amax(-1) / largest).clamp(min=1e-6)
            factors = of_heads[..., None]
        rows = (rows.float() / factors).clamp(-largest, largest)
        rows = rows.round() if cache.dtype == torch.int8 else rows
        cache.view(torch.uint8)[at] = rows.to(cache.dtype).view(torch.uint8)  # torch has no indexed store of float8


def _pairs(inputs: Any) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
    """New tokens, cache, scales and zero points, of K and of V, places of a page before heads."""
    for name, new in (("k", inputs.key), ("v", inputs.value)):
        if inputs.cache == "int4_rotated":
            new = (new.float() @ rotation(new.shape[-1]).to(new.device, torch.float32)).to(new.dtype)
        cache = getattr(inputs, f"{name}_cache")
        scale = getattr(inputs, f"{name}_scales", getattr(inputs, f"{name}_scale", None))
        zeros = getattr(inputs, f"{name}_zeros", None)
        if inputs.layout == "HND":
            cache = cache.transpose(1, 2)
            scale = scale if scale is None or scale.dim() == 1 else scale.transpose(1, 2)
            zeros = None if zeros is None else zeros.transpose(1, 2)
        yield new, cache, scale, zeros
