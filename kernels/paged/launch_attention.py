"""Checked wrapper of the kernel for several query tokens per sequence on a paged KV cache.

As in ``dense.launch``: results are allocated unless given, strides are honoured, nothing waits for the device.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from attnfuzz.kernels.common.checks import check_launch, check_positive, check_power_of_two
from attnfuzz.kernels.common.device import on_device_of
from attnfuzz.kernels.common.prepare import prepare_paged
from attnfuzz.kernels.common.variants import Variants
from attnfuzz.kernels.paged.paged_attention import paged_attention_kernel


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
    causal: bool = True,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    tile: int = 32,
    num_warps: int = 4,
    num_stages: int = 3,
    **variants: Unpack[Variants],
) -> tuple[Tensor, Tensor]:
    """Attention of the last tokens of each sequence over a paged KV cache that holds their keys too.

    Shapes: ``q [num_tokens, num_q_heads, head_size]``, the query tokens of all sequences one after another;
    ``cu_seqlens_q [num_seqs + 1]``, where each sequence's begin, and their number at the end; ``seq_lens [num_seqs]``,
    context and new tokens, at least as many as the sequence has query tokens; both int32 or int64. Caches, table and
    the launch's settings as for ``paged.launch.paged_decode``. With n query tokens in a sequence of length L, the j-th
    attends to positions 0 to L - n + j, or to all L unless ``causal``; n may be 0. ``max_query_len``, ``max_seq_len``:
    upper bounds of both lengths, which this kernel, with a program per token, can do without. ``variants``: as for
    ``paged_decode``, from the position of each query token, which is the last one unless ``causal``.

    Returns ``out [num_tokens, num_q_heads, v_head_size]`` in q's dtype and ``lse [num_tokens, num_q_heads]`` float32,
    natural log: 0 and -inf (or the sink) for a row of q that no sequence has. Raises ValueError.
    """
    call = prepare_paged(
        q, k_cache, v_cache, block_table, seq_lens, block_size, layout, out, lse, variants, cu_seqlens_q
    )  # fmt: skip
    (out, lse), sizes = call.results, call.sizes
    check_positive("max_query_len", max_query_len)
    check_positive("max_seq_len", max_seq_len)
    check_power_of_two("tile", tile)
    launch = check_launch(num_warps, num_stages)
    if sizes["num_tokens"] == 0:
        return out, lse
    with on_device_of(q):
        paged_attention_kernel[(sizes["num_tokens"], sizes["num_q_heads"])](
            q, *q.stride(), k_cache, *call.strides.k, v_cache, *call.strides.v,
            block_table, *block_table.stride(), seq_lens, *seq_lens.stride(), cu_seqlens_q, *cu_seqlens_q.stride(),
            out, *out.stride(), lse, *lse.stride(),
            float(scale), sizes["num_seqs"], block_size, sizes["group_size"], *call.head_sizes,
            TILE=tile, CAUSAL=causal, **call.constants, **launch, **call.variant.of_rows,
        )  # fmt: skip
    return out, lse
