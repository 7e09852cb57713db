"""The four cache layouts seen as one: views whose first two dimensions are (page, offset in page)."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from attnfuzz.problems.supports import Layout

__all__ = ["TokenViews", "split_interleaved", "token_views"]


class TokenViews(NamedTuple):
    """``k[page, offset]`` and ``v[page, offset]`` are one token's ``[num_kv_heads, ...]``, in memory of the cache.

    In the packed layout K ends in ``[head_size/x, x]`` instead of ``[head_size]``.
    """

    k: Float[Tensor, "num_blocks block_size num_kv_heads *k_head"]
    v: Float[Tensor, "num_blocks block_size num_kv_heads head_size"]


def token_views(k_cache: Float[Tensor, "..."], v_cache: Float[Tensor, "..."], layout: Layout) -> TokenViews:
    """Views of ``k_cache`` and ``v_cache`` (shapes as ``layout`` says); writing to them writes to the cache."""
    if layout == "HND":
        return TokenViews(k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    if layout == "packed":
        return TokenViews(k_cache.permute(0, 3, 1, 2, 4), v_cache.permute(0, 3, 1, 2))
    return TokenViews(k_cache, v_cache)


def split_interleaved(
    kv_cache: Float[Tensor, "num_blocks 2 block_size num_kv_heads head_size"],
) -> tuple[
    Float[Tensor, "num_blocks block_size num_kv_heads head_size"],
    Float[Tensor, "num_blocks block_size num_kv_heads head_size"],
]:
    """K and V of the interleaved layout: strided views of one tensor."""
    return kv_cache[:, 0], kv_cache[:, 1]
