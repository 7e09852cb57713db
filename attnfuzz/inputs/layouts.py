"""The four cache layouts seen as one: views in which every token has a page and an offset in it, side by side."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from attnfuzz.problems.attention import CaseBase
from attnfuzz.problems.supports import Layout, LseLayout


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


def with_both_caches(case: CaseBase, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` with K and V in place of the one cache of the interleaved layout, or beside that of latent_decode."""
    if "kv_cache" not in tensors:
        return tensors
    if case.values_in_keys:
        k_cache = tensors["kv_cache"].unsqueeze(-2)
        return tensors | {"k_cache": k_cache, "v_cache": k_cache[..., : case.value_size]}
    k_cache, v_cache = split_interleaved(tensors["kv_cache"])
    others = {name: tensor for name, tensor in tensors.items() if name != "kv_cache"}
    return others | {"k_cache": k_cache, "v_cache": v_cache}


def tokens_first(lse: Float[Tensor, "..."], layout: LseLayout) -> Float[Tensor, "*runs num_tokens num_q_heads"]:
    """A view of an LSE tensor of merge_states with axes (token, head), whatever its layout."""
    return lse if layout == "TH" else lse.mT
