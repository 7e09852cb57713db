"""Checked wrapper of the kernel for several query tokens per sequence on a paged KV cache.

As in ``launch``: results are allocated unless given, strides are honoured, nothing waits for the device.
"""

from __future__ import annotations

import triton
from torch import Tensor

from attnfuzz.kernels.common.checks import check_launch, check_positive, check_power_of_two
from attnfuzz.kernels.common.device import on_device_of
from attnfuzz.kernels.common.kv_scales import KvScales
from attnfuzz.kernels.common.layouts import cache_strides
from attnfuzz.kernels.common.prepare import prepare_attention
from attnfuzz.kernels.common.variants import Variant, check_variant, sink_arguments
from attnfuzz.kernels.paged.paged_attention import paged_attention_kernel

__all__ = ["paged_attention"]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    block_size: int,
    layout: str,
    *,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tile: int = 32,
    num_warps: int = 4,
    num_stages: int = 3,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last tokens of each sequence over a paged KV cache that holds their keys too.

    Shapes: ``q [num_tokens, num_q_heads, head_size]``, the query tokens of all sequences one after another;
    ``cu_seqlens_q [num_seqs + 1]``, where each sequence's begin, and their number at the end; ``seq_lens [num_seqs]``,
    context and new tokens, at least as many as the sequence has query tokens; both int32 or int64. Caches, table and
    the launch's settings as for ``launch_paged.paged_decode``. With n query tokens in a sequence of length L, the j-th
    attends to positions 0 to L - n + j; n may be 0. ``max_query_len``, ``max_seq_len``: upper bounds of both lengths,
    which this kernel, with a program per token, can do without. ``window``, ``soft_cap``, ``alibi_slopes``, ``sinks``:
    as for ``paged_decode``, from the position of each query token; so are ``k_scale`` and ``v_scale``.

    Returns ``out [num_tokens, num_q_heads, v_head_size]`` in q's dtype and ``lse [num_tokens, num_q_heads]`` float32,
    natural log: 0 and -inf (or the sink) for a row of q that no sequence has. Raises ValueError.
    """
    variant = Variant(window, soft_cap, alibi_slopes, sinks)
    check_variant(variant)
    scales = KvScales(k_scale, v_scale)
    inputs = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    inputs |= {"cu_seqlens_q": cu_seqlens_q, **variant.tensors, **scales.tensors}
    out, lse, sizes = prepare_attention(inputs, layout, block_size, out, lse)
    check_positive("max_query_len", max_query_len)
    check_positive("max_seq_len", max_seq_len)
    check_power_of_two("tile", tile)
    launch = check_launch(num_warps, num_stages)
    if sizes["num_tokens"] == 0:
        return out, lse
    k_strides, v_strides, x = cache_strides(k_cache, v_cache, layout)
    with on_device_of(q):
        paged_attention_kernel[(sizes["num_tokens"], sizes["num_q_heads"])](
            q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out, lse,
            float(scale), sizes["num_seqs"], block_size, sizes["group_size"],
            sizes["head_size"], sizes["v_head_size"],
            *q.stride(), *k_strides, *v_strides, *block_table.stride(), *seq_lens.stride(), *cu_seqlens_q.stride(),
            *out.stride(), *lse.stride(),
            X=x, TILE=tile, BLOCK_D=triton.next_power_of_2(sizes["head_size"]),
            BLOCK_DV=triton.next_power_of_2(sizes["v_head_size"]), **launch,
            **variant.of_scores, **sink_arguments(sinks), **scales.arguments,
        )  # fmt: skip
    return out, lse
