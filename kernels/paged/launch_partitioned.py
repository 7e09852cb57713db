"""Checked wrappers of PagedAttention v1 and v2, on the packed KV cache.

As in ``dense.launch``: results are allocated unless given, strides are honoured, nothing waits for the device. The
host does not know the lengths: workspaces and grids have room for as many tokens as the block table has entries for.
"""

from __future__ import annotations

from typing import Unpack

import torch
import triton
from torch import Tensor

from attnfuzz.kernels.common.alignment import common_alignment, in_units
from attnfuzz.kernels.common.checks import check_grid, check_launch, check_positive, check_power_of_two
from attnfuzz.kernels.common.device import on_device_of
from attnfuzz.kernels.common.prepare import empty_partials, prepare_paged
from attnfuzz.kernels.common.variants import Variants, sink_arguments
from attnfuzz.kernels.paged.paged_attention_v1 import paged_attention_v1_kernel
from attnfuzz.kernels.paged.paged_attention_v2 import paged_attention_v2_kernel, paged_attention_v2_reduce_kernel


def paged_attention_v1(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_size: int,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    tile: int = 16,
    num_warps: int = 4,
    num_stages: int = 3,
    **variants: Unpack[Variants],
) -> tuple[Tensor, Tensor]:
    """``paged.launch.paged_decode`` on a cache in the packed layout; arguments, result and errors as there.

    Allocates 4 bytes of scores for each sequence, query head and token that the block table has room for: 1 GiB for 64
    sequences with 32 heads and 131,072 tokens. A table cut to the longest sequence (``block_table[:, :n]``) takes less.
    """
    call = prepare_paged(q, k_cache, v_cache, block_table, seq_lens, block_size, "packed", out, lse, variants)
    (out, lse), sizes = call.results, call.sizes
    check_power_of_two("tile", tile)
    launch = check_launch(num_warps, num_stages)
    align = common_alignment(k_cache)
    logits = _empty_logits(q, block_table, block_size)
    with on_device_of(q):
        paged_attention_v1_kernel[(sizes["num_seqs"], sizes["num_q_heads"])](
            q, *q.stride(), k_cache, *in_units(call.strides.k, align), v_cache, *call.strides.v,
            block_table, *block_table.stride(), seq_lens, *seq_lens.stride(), logits, *logits.stride()[:-1],
            out, *out.stride(), lse, *lse.stride(),
            float(scale), block_size, sizes["group_size"], *call.head_sizes,
            ALIGN=align, TILE=tile, **call.constants, **launch, **call.variant.of_rows,
        )  # fmt: skip
    return out, lse


def paged_attention_v2(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_size: int,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    partition_size: int = 512,
    partial_dtype: str = "float32",
    tile: int = 16,
    num_warps: int = 4,
    num_stages: int = 3,
    num_combined: int = 4,
    **variants: Unpack[Variants],
) -> tuple[Tensor, Tensor]:
    """``paged_attention_v1`` in partitions of ``partition_size`` tokens, any number of them, and their reduction.

    ``partial_dtype``: ``"float32"``, or ``"input"`` to keep the partial outputs in q's dtype, as vLLM does, which
    halves their traffic and costs them one more rounding. ``num_combined``: partitions that the reduction takes in one
    step, a power of two. Other arguments, result, memory of scores and errors as for v1; partial results take
    ``v_head_size + 2`` numbers for each sequence, query head and partition besides.
    """
    call = prepare_paged(q, k_cache, v_cache, block_table, seq_lens, block_size, "packed", out, lse, variants)
    (out, lse), sizes = call.results, call.sizes
    check_power_of_two("tile", tile)
    check_positive("partition_size", partition_size)
    check_power_of_two("num_combined", num_combined)
    launch = check_launch(num_warps, num_stages)
    align = common_alignment(k_cache)
    logits = _empty_logits(q, block_table, block_size)
    partition_size = min(partition_size, max(1, logits.shape[-1]))
    num_partitions = max(1, triton.cdiv(logits.shape[-1], partition_size))
    check_grid("num_partitions", num_partitions, f"make partition_size={partition_size} larger")
    partial_out = empty_partials(q, num_partitions, partial_dtype, sizes["v_head_size"])
    max_logits = torch.empty(partial_out.shape[:-1], dtype=torch.float32, device=q.device)
    exp_sums = torch.empty_like(max_logits)
    partials = (partial_out, *partial_out.stride(), max_logits, exp_sums, *max_logits.stride()[:-1])
    with on_device_of(q):
        paged_attention_v2_kernel[(sizes["num_seqs"], sizes["num_q_heads"], num_partitions)](
            q, *q.stride(), k_cache, *in_units(call.strides.k, align), v_cache, *call.strides.v,
            block_table, *block_table.stride(), seq_lens, *seq_lens.stride(), logits, *logits.stride()[:-1], *partials,
            float(scale), partition_size, block_size, sizes["group_size"], *call.head_sizes,
            ALIGN=align, TILE=tile, **call.constants, **launch, **call.variant.of_scores,
        )  # fmt: skip
        paged_attention_v2_reduce_kernel[(sizes["num_seqs"], sizes["num_q_heads"])](
            *partials, seq_lens, *seq_lens.stride(), out, *out.stride(), lse, *lse.stride(),
            partition_size=partition_size, v_head_size=sizes["v_head_size"], window=call.variant.window,
            CHUNK=num_combined, BLOCK_DV=call.constants["BLOCK_DV"], **launch, **sink_arguments(call.variant.sinks),
        )  # fmt: skip
    return out, lse


def _empty_logits(q: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """A score for each query head and token ``[num_seqs, num_q_heads, max_blocks_per_seq * block_size]``."""
    return torch.empty((*q.shape[:-1], block_table.shape[1] * block_size), dtype=torch.float32, device=q.device)
