"""latent_decode: one query token per sequence over a cache of latent vectors, which are keys and values at once.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) caches of each token one vector of ``rank`` numbers, from
which the keys and values of all heads are made, and a few more numbers that carry its position. Once the matrices
that make them are multiplied into the queries and the output ("weight absorption"), what is left to a kernel is
attention of many query heads to one KV head: a token's key is its whole row of the cache, and its value the first
``rank`` numbers of that row. FlashMLA and the Triton kernels of vLLM and SGLang are called so, with 576 and 512.

A case is one of paged_decode with one KV head, whose V lies within K.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Float32, Int32
from torch import Tensor

from attnfuzz.problems.cases import LatentDecodeCase
from attnfuzz.problems.paged_decode import with_both_caches
from attnfuzz.problems.supports import Layout

__all__ = ["LatentDecodeInputs", "inputs_of"]


@dataclass(slots=True)
class LatentDecodeInputs:
    """What a latent_decode kernel gets: one cache, and views of it that are K and V, as Triton kernels take them.

    ``v_head_size`` is the rank of the latent vectors. ``layout`` is that of the views. Dead memory is that of
    paged_decode. The last four are None unless the case asks for that variant (`attnfuzz.problems.variants`).
    """

    q: Float[Tensor, "num_seqs num_q_heads head_size"]
    kv_cache: Float[Tensor, "num_blocks block_size head_size"]
    k_cache: Float[Tensor, "num_blocks block_size 1 head_size"]
    v_cache: Float[Tensor, "num_blocks block_size 1 v_head_size"]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"]
    seq_lens: Int32[Tensor, " num_seqs"]
    scale: float
    block_size: int
    v_head_size: int
    layout: Layout
    out: Float[Tensor, "num_seqs num_q_heads v_head_size"]
    lse: Float32[Tensor, "num_seqs num_q_heads"]
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Float32[Tensor, " num_q_heads"] | None = None
    sinks: Float32[Tensor, " num_q_heads"] | None = None


def inputs_of(case: LatentDecodeCase, tensors: dict[str, Tensor]) -> LatentDecodeInputs:
    """What the kernel gets, of ``tensors`` by the names that ``tensor_specs`` gives them."""
    return LatentDecodeInputs(
        scale=case.scale,
        block_size=case.block_size,
        v_head_size=case.value_size,
        layout=case.layout,
        window=case.variant.window,
        soft_cap=case.variant.soft_cap,
        **with_both_caches(case, tensors),
    )
