"""The four cache layouts seen as one: views in which every token has a page and an offset in it, side by side."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from attnfuzz.problems.supports import Layout

__all__ = ["TokenViews", "split_interleaved", "token_views"]


class TokenViews(NamedTuple):
    """``k[page, offset]`` and ``v[page, offset]`` are one token's ``[num_kv_heads, ...]``, in memory of the cache.

    In the packed layout K ends in ``[head_size/x, x]`` instead of ``[head_size]``. Further dimensions come first.
    """

    k: Float[Tensor, "*runs num_blocks block_size num_kv_heads *k_head"]
    v: Float[Tensor, "*runs num_blocks block_size num_kv_heads v_head_size"]


def token_views(k_cache: Float[Tensor, "..."], v_cache: Float[Tensor, "..."], layout: Layout) -> TokenViews:
    """Views of ``k_cache`` and ``v_cache`` (shapes as ``layout`` says); writing to them writes to the cache."""
    if layout == "HND":
        return TokenViews(k_cache.transpose(-3, -2), v_cache.transpose(-3, -2))
    if layout == "packed":
        return TokenViews(k_cache.movedim(-2, -4), v_cache.movedim(-1, -3))
    return TokenViews(k_cache, v_cache)


def split_interleaved(
    kv_cache: Float[Tensor, "*runs_and_blocks 2 block_size num_kv_heads head_size"],
) -> tuple[
    Float[Tensor, "*runs_and_blocks block_size num_kv_heads head_size"],
    Float[Tensor, "*runs_and_blocks block_size num_kv_heads head_size"],
]:
    """K and V of the interleaved layout: strided views of one tensor."""
    return kv_cache.select(-4, 0), kv_cache.select(-4, 1)
