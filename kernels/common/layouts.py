"""The four layouts of a paged KV cache, and the strides by which one kernel reads them all.

* ``NHD``: K ``[num_blocks, block_size, num_kv_heads, head_size]``, V likewise
* ``HND``: K ``[num_blocks, num_kv_heads, block_size, head_size]``, V likewise
* ``packed``: K ``[num_blocks, num_kv_heads, head_size / x, block_size, x]`` with x elements in 16 bytes,
  V ``[num_blocks, num_kv_heads, v_head_size, block_size]``
* ``interleaved``: as NHD; K and V are views of one ``[num_blocks, 2, block_size, num_kv_heads, head_size]``

Heads of V have ``v_head_size`` dimensions, which may be more or fewer than K's, except where both lie in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from attnfuzz.kernels.common.checks import FLOAT8, PAGED, Specs, check_choice, check_tensors, group_size_of


class CacheStrides(NamedTuple):
    """Strides in elements, and the packed layout's ``x`` (1 in the others)."""

    k: tuple[int, int, int, int, int]
    """block, token, head, d // x, d % x"""
    v: tuple[int, int, int, int]
    """block, token, head, d"""
    x: int


def check_paged(
    tensors: Mapping[str, Tensor], layout: str, block_size: int, specs: Mapping[str, Specs] = PAGED
) -> dict[str, int]:
    """Check the tensors of a paged problem, of which ``specs`` has those of each layout.

    Returns the size of each axis, and ``group_size``. Raises ValueError.
    """
    check_choice("layout", layout, specs)
    sizes = check_tensors(tensors, specs[layout])
    if sizes["block_size"] != block_size:
        held = sizes["block_size"]
        raise ValueError(f"block_size={block_size!r} must be {held}, that of k_cache; check layout={layout!r}")
    if layout == "packed" and sizes["head_chunks"] * sizes["x"] != sizes["head_size"]:
        raise ValueError(
            f"k_cache.shape={list(tensors['k_cache'].shape)} must hold head_size={sizes['head_size']} as "
            "head_chunks * x; reshape k_cache"
        )
    _check_scales(tensors, sizes)
    return {**sizes, "group_size": group_size_of(sizes["num_q_heads"], sizes["num_kv_heads"])}


def _check_scales(tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
    cache = tensors["k_cache"]
    if (cache.dtype in FLOAT8) != ("k_scale" in tensors and "v_scale" in tensors):
        raise ValueError(
            f"k_cache.dtype={cache.dtype}: an 8-bit cache has k_scale and v_scale, and no other has; pass both to a "
            "kernel that takes them, or a cache of q's dtype without them"
        )
    if "k_scale" in tensors and sizes["num_kv_scales"] not in (1, sizes["num_kv_heads"]):
        raise ValueError(
            f"k_scale.shape=[{sizes['num_kv_scales']}] must be [1] or [num_kv_heads={sizes['num_kv_heads']}]; "
            "pass one scale, or one for each KV head"
        )


def cache_strides(k_cache: Tensor, v_cache: Tensor, layout: str) -> CacheStrides:
    """Strides of both caches in the kernels' order."""
    k, v = k_cache.stride(), v_cache.stride()
    if layout == "packed":
        return CacheStrides((k[0], k[3], k[1], k[2], k[4]), (v[0], v[3], v[1], v[2]), k_cache.shape[4])
    token, head = (2, 1) if layout == "HND" else (1, 2)
    return CacheStrides((k[0], k[token], k[head], k[3], 0), (v[0], v[token], v[head], v[3]), 1)


def size_of_values(v_cache: Tensor, layout: str) -> int:
    """Dimensions of V's heads, before anything is checked: 0 of a tensor that can hold none."""
    axis = -2 if layout == "packed" else -1
    return v_cache.shape[axis] if v_cache.dim() >= 2 else 0


def gather_pages(k_cache: Tensor, v_cache: Tensor, layout: str, pages: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of ``pages [rows, num_pages]``: ``[rows, num_pages * block_size, num_kv_heads, their head size]``."""
    k, v = (_pages_of(cache, pages) for cache in (k_cache, v_cache))
    if layout == "packed":
        k, v = k.permute(0, 1, 4, 2, 3, 5).flatten(4), v.permute(0, 1, 4, 2, 3)
    elif layout == "HND":
        k, v = k.transpose(2, 3), v.transpose(2, 3)
    return k.flatten(1, 2), v.flatten(1, 2)


def _pages_of(cache: Tensor, pages: Tensor) -> Tensor:
    """``cache[pages]``; of 8 bits, in float32: not all of torch's versions can index float8."""
    if cache.dtype not in FLOAT8:
        return cache[pages]
    return cache.view(torch.uint8)[pages].view(cache.dtype).float()
