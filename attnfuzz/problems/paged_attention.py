"""paged_attention: attention of several query tokens per sequence over a paged cache that holds their keys.

One problem for prefill (every token of a sequence is a query), decode (the last one is), chunked prefill (some of the
last) and batches that mix them, as serving engines launch it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Float32, Int32
from torch import Tensor

from attnfuzz.problems.cases import PagedAttentionCase, VarlenCase
from attnfuzz.problems.paged_decode import with_both_caches
from attnfuzz.problems.supports import Layout

__all__ = ["PagedAttentionInputs", "inputs_of", "varlen_arguments"]


@dataclass(slots=True)
class PagedAttentionInputs:
    """What a paged_attention kernel gets. The caches have the shapes of ``layout``; all queries' keys are in them.

    ``seq_lens`` counts context and new tokens. The query tokens of sequence s are the rows from ``cu_seqlens_q[s]`` to
    ``cu_seqlens_q[s + 1]`` of q; with n of them and length L, the j-th attends to positions 0 to L - n + j, or to all
    L unless ``causal``, as if it stood at the last position. n may be 0. ``max_query_len`` and ``max_seq_len`` are
    upper bounds, known on the host. Dead memory is that of paged_decode: keys behind a query are live, but not for this
    query. Six of the last are None unless the case asks for that variant or for an 8-bit cache, as in paged_decode.
    """

    q: Float[Tensor, "num_tokens num_q_heads head_size"]
    k_cache: Float[Tensor, "num_blocks ..."]
    v_cache: Float[Tensor, "num_blocks ..."]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"]
    seq_lens: Int32[Tensor, " num_seqs"]
    cu_seqlens_q: Int32[Tensor, " num_seqs_plus_1"]
    scale: float
    block_size: int
    layout: Layout
    max_query_len: int
    max_seq_len: int
    out: Float[Tensor, "num_tokens num_q_heads v_head_size"]
    lse: Float32[Tensor, "num_tokens num_q_heads"]
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Float32[Tensor, " num_q_heads"] | None = None
    sinks: Float32[Tensor, " num_q_heads"] | None = None
    k_scale: Float32[Tensor, " num_kv_scales"] | None = None
    v_scale: Float32[Tensor, " num_kv_scales"] | None = None
    causal: bool = True


def inputs_of(case: PagedAttentionCase, tensors: dict[str, Tensor]) -> PagedAttentionInputs:
    """What the kernel gets, of ``tensors`` by the names that ``tensor_specs`` gives them."""
    return PagedAttentionInputs(window=case.variant.window, causal=case.causal, **varlen_arguments(case, tensors))


def varlen_arguments(case: VarlenCase, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What kernels of all problems with several query tokens get, by name."""
    return {
        "scale": case.scale,
        "block_size": case.block_size,
        "layout": case.layout,
        "max_query_len": case.max_query_len,
        "max_seq_len": case.max_seq_len,
        "soft_cap": case.variant.soft_cap,
        **with_both_caches(case, tensors),
    }
