"""Checked wrappers of the kernels on a paged KV cache: paged decode, and split-K decode with its reduction.

As in ``dense.launch``: results are allocated unless given, strides are honoured, nothing waits for the device.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
import triton
from torch import Tensor

from attnfuzz.kernels.common.checks import check_launch, check_power_of_two
from attnfuzz.kernels.common.device import count_sms, on_device_of
from attnfuzz.kernels.common.layouts import size_of_values
from attnfuzz.kernels.common.prepare import empty_partials, prepare_paged, prepare_reduce, prepare_split
from attnfuzz.kernels.common.variants import Variants, sink_arguments
from attnfuzz.kernels.paged.num_splits import resolve_num_splits
from attnfuzz.kernels.paged.paged_decode import paged_decode_kernel
from attnfuzz.kernels.paged.reduce_splits import reduce_splits_kernel
from attnfuzz.kernels.paged.split_decode import split_decode_kernel

_SPLITS_PER_STEP = 4
"""At least. Fewer than a kernel is declared to be tried with, so that more than one step is."""
_ELEMENTS_PER_STEP = 8192
"""Partial outputs in a step, at most: 64 registers of each of 128 threads."""


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_size: int,
    layout: str,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    tile: int = 32,
    num_warps: int = 4,
    num_stages: int = 3,
    **variants: Unpack[Variants],
) -> tuple[Tensor, Tensor]:
    """Attention of one query token per sequence over a paged KV cache.

    Shapes: ``q [num_seqs, num_q_heads, head_size]``; ``k_cache, v_cache`` as ``layouts`` says for ``layout``, all in
    float16, bfloat16 or float32; ``block_table [num_seqs, max_blocks_per_seq]`` and ``seq_lens [num_seqs]`` int32 or
    int64. ``block_size``: tokens per page. ``tile``: keys per step, a power of two. ``num_warps``, ``num_stages``: of
    the launch, as in ``triton.Config``; they change the speed only. Entries past a sequence's last page are not read.

    ``variants``: see there.

    Returns ``out [num_seqs, num_q_heads, v_head_size]`` in q's dtype and ``lse [num_seqs, num_q_heads]`` float32,
    natural log: 0 and -inf (or the sink) for an empty sequence. Raises ValueError.
    """
    call = prepare_paged(q, k_cache, v_cache, block_table, seq_lens, block_size, layout, out, lse, variants)
    (out, lse), sizes = call.results, call.sizes
    check_power_of_two("tile", tile)
    launch = check_launch(num_warps, num_stages)
    with on_device_of(q):
        paged_decode_kernel[(sizes["num_seqs"], sizes["num_q_heads"])](
            q, *q.stride(), k_cache, *call.strides.k, v_cache, *call.strides.v,
            block_table, *block_table.stride(), seq_lens, *seq_lens.stride(), out, *out.stride(), lse, *lse.stride(),
            float(scale), block_size, sizes["group_size"], *call.head_sizes,
            TILE=tile, **call.constants, **launch, **call.variant.of_rows,
        )  # fmt: skip
    return out, lse


def split_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_size: int,
    layout: str,
    num_splits: int,
    *,
    partial_out: Tensor | None = None,
    partial_lse: Tensor | None = None,
    tile: int = 32,
    num_warps: int = 4,
    num_stages: int = 3,
    **variants: Unpack[Variants],
) -> tuple[Tensor, Tensor]:
    """Partial states of ``paged_decode`` over ``num_splits`` consecutive ranges of each sequence's tokens.

    Arguments as for ``paged_decode``. Split ``s`` covers tokens ``[s * n, min((s + 1) * n, seq_len))``, with
    ``n = ceil(seq_len / num_splits)``.

    Returns ``partial_out [num_seqs, num_q_heads, num_splits, v_head_size]``, in q's dtype unless given in another, and
    ``partial_lse [num_seqs, num_q_heads, num_splits]`` float32: 0 and -inf for an empty split. Raises ValueError.
    """
    call = prepare_split(
        q, k_cache, v_cache, block_table, seq_lens, block_size, layout, num_splits, partial_out, partial_lse, variants
    )  # fmt: skip
    (partial_out, partial_lse), sizes = call.results, call.sizes
    check_power_of_two("tile", tile)
    launch = check_launch(num_warps, num_stages)
    with on_device_of(q):
        split_decode_kernel[(sizes["num_seqs"], sizes["num_q_heads"], num_splits)](
            q, *q.stride(), k_cache, *call.strides.k, v_cache, *call.strides.v,
            block_table, *block_table.stride(), seq_lens, *seq_lens.stride(),
            partial_out, *partial_out.stride(), partial_lse, *partial_lse.stride(),
            float(scale), num_splits, block_size, sizes["group_size"], *call.head_sizes,
            TILE=tile, **call.constants, **launch, **call.variant.of_scores,
        )  # fmt: skip
    return partial_out, partial_lse


def reduce_splits(
    partial_out: Tensor,
    partial_lse: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sinks: Tensor | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
) -> tuple[Tensor, Tensor]:
    """Combine the partial states that ``split_decode`` returns, and ``sinks`` as in ``paged_decode``.

    Returns ``out [num_seqs, num_q_heads, head_size]``, in partial_out's dtype unless given in another, and
    ``lse [num_seqs, num_q_heads]`` float32: 0 and -inf where all splits are empty. Raises ValueError.
    """
    out, lse, sizes = prepare_reduce(partial_out, partial_lse, out, lse, sinks)
    launch = check_launch(num_warps, num_stages)
    num_splits, block_d = sizes["num_splits"], triton.next_power_of_2(sizes["head_size"])
    # Steps wait for each other: many splits are read in four.
    chunk = max(_SPLITS_PER_STEP, min(triton.next_power_of_2(num_splits) // 4, _ELEMENTS_PER_STEP // block_d))
    with on_device_of(out):
        reduce_splits_kernel[(sizes["num_seqs"], sizes["num_q_heads"])](
            partial_out, *partial_out.stride(), partial_lse, *partial_lse.stride(),
            out, *out.stride(), lse, *lse.stride(),
            num_splits=num_splits, head_size=sizes["head_size"], CHUNK=chunk, BLOCK_D=block_d, **launch,
            **sink_arguments(sinks),
        )  # fmt: skip
    return out, lse


def split_paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_size: int,
    layout: str,
    num_splits: int | str,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_seq_len: int | None = None,
    num_sms: int | None = None,
    tile: int = 32,
    partial_dtype: str = "float32",
    num_warps: int = 4,
    num_stages: int = 3,
    **variants: Unpack[Variants],
) -> tuple[Tensor, Tensor]:
    """``paged_decode`` in two stages, ``split_decode`` and ``reduce_splits``.

    ``num_splits``: a number, or ``"one_per_sm"`` or ``"device"`` for one that ``num_splits`` chooses by the shapes, an
    upper bound ``max_seq_len`` of the lengths (by default what the table has entries for) and the number of
    multiprocessors ``num_sms`` (by default q's device's). The result of a row then depends on its batch, in its last
    bits.
    ``partial_dtype``: ``"float32"``, or ``"input"`` to keep the partial outputs in q's dtype, which halves their
    traffic and costs them one more rounding. Other arguments and the result as for ``paged_decode``. Raises ValueError.
    """
    sinks = variants.pop("sinks", None)  # added once for a row, by the second stage
    max_seq_len = block_table.shape[-1] * block_size if max_seq_len is None else max_seq_len
    num_programs = math.prod(q.shape[:-1])
    num_splits = resolve_num_splits(num_splits, max_seq_len, num_programs, num_sms or count_sms(q))
    v_head_size = size_of_values(v_cache, layout)
    partial_out = empty_partials(q, num_splits, partial_dtype, v_head_size)
    out = torch.empty((*q.shape[:-1], v_head_size), dtype=q.dtype, device=q.device) if out is None else out
    partial_out, partial_lse = split_decode(
        q, k_cache, v_cache, block_table, seq_lens, scale, block_size, layout, num_splits,
        partial_out=partial_out, tile=tile, num_warps=num_warps, num_stages=num_stages,
        **variants,
    )  # fmt: skip
    return reduce_splits(
        partial_out, partial_lse, out=out, lse=lse, sinks=sinks, num_warps=num_warps, num_stages=num_stages
    )
