"""When ``q_block_attention`` goes to the kernel for Hopper, and how that is launched.

Decodes among prompts would take a block of rows each, of which one group is used. ``grouped_decode`` takes them.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnfuzz.kernels.common.device import GpuLimits, on_device_of
from attnfuzz.kernels.common.prepare import PagedCall
from attnfuzz.kernels.common.variants import Variant
from attnfuzz.kernels.grouped.launch import grouped_decode
from attnfuzz.kernels.q_block.heuristics import choose

__all__ = ["is_for_hopper", "launch_on_hopper"]

_HOPPER = (9, 0)
_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_SIZES = (64, 128)
_BLOCK_M = 128
_SHORT = 1024
"""Query tokens, and keys as far as the host knows those of prompts."""
_OF_LONG: dict[str, Any] = {"TILE": 128, "STAGES": 2, "PINGPONG": True, "by_tma": True}
_OF_SHORT: dict[str, Any] = {"TILE": 64, "STAGES": 3, "PINGPONG": False, "by_tma": False}
"""Of small tiles less lies beyond what rows see. On an H200 16 of 512 take 141 us, and 157; 8 of 2,048 708 and 645."""
_CHUNK = 16
"""Tokens that are copied at a time, if a page has as many."""
_FEWEST_ROWS = 64
"""Of the longest sequence: query tokens times heads of a group."""
_LEAST_COUNTED, _MOST_COUNTED = 32, 256
"""Sequences among which each warp looks for that of its block: a register of each of its threads for 32."""
_ALIGNMENT = 16
_MOST_OFFSET = 1 << 31
_COLUMNS_OF_A_BOX = 64
_NO_BOXES = {"d_k": None, "d_v": None, "rows_b": 0, "rows_h": 0, "columns_h": 0}


@cache
def _kernel() -> Any | None:
    """Gluon is no part of Triton before 3.4, and may change: without it prompts are as on other GPUs."""
    try:
        from attnfuzz.kernels.q_block.q_block_hopper import q_block_hopper_kernel
    except (ImportError, AttributeError):
        return None
    return q_block_hopper_kernel


def is_for_hopper(
    gpu: GpuLimits,
    call: PagedCall,
    inputs: tuple[Tensor, ...],
    scale: float,
    max_query_len: int,
    max_seq_len: int,
) -> bool:
    """Whether these are of the sizes and strides that the kernel knows, and the GPU is Hopper itself.

    Later ones have no warp groups. Rows are copied in pieces of 16 bytes. Where few blocks have many keys, segments of
    them run in parallel, which this kernel does not know.
    """
    sizes, group = call.sizes, call.sizes["group_size"]
    if gpu.capability != _HOPPER or call.variant != Variant() or not 0 < scale < math.inf:
        return False
    q, k_cache, v_cache, *lists = inputs
    is_sized = (
        q.dtype in _DTYPES
        and k_cache.dtype == q.dtype
        and sizes["head_size"] in _HEAD_SIZES
        and sizes["v_head_size"] == sizes["head_size"]
        and group <= _BLOCK_M
        and max_query_len * group >= _FEWEST_ROWS
        and 0 < sizes["num_seqs"] <= _MOST_COUNTED
        and sizes["num_tokens"] > 0
    )
    if not is_sized or call.strides.x > 1:
        return False
    rows = (
        (q, q.stride()), (call.out, call.out.stride()),
        (k_cache, call.strides.k[:4]), (v_cache, call.strides.v),
    )  # fmt: skip
    are_whole = all(
        strides[-1] == 1 and one.data_ptr() % _ALIGNMENT == 0 and all(n % _ALIGNMENT == 0 for n in strides[:-1])
        for one, strides in rows
    )
    are_plain = all(one.stride(-1) == 1 for one in lists)
    fit = all(sizes["block_size"] * one[1] < _MOST_OFFSET for one in (call.strides.k, call.strides.v))
    if not (are_whole and are_plain and fit):
        return False
    otherwise = choose(
        num_seqs=sizes["num_seqs"], num_q_heads=sizes["num_q_heads"], num_kv_heads=sizes["num_kv_heads"],
        head_size=sizes["head_size"], itemsize=q.element_size(), max_query_len=max_query_len, max_seq_len=max_seq_len,
        num_sms=gpu.processors, gpu=gpu,
    )  # fmt: skip
    return otherwise.num_segments == 1 and _kernel() is not None


class _Boxes(NamedTuple):
    """Arguments by which the kernel has TMA copy pages: descriptors of both caches as ``[rows, columns]``, rows from
    page to page and from head to head, and columns from head to head.
    """

    d_k: Any
    d_v: Any
    rows_b: int
    rows_h: int
    columns_h: int


def _boxes(call: PagedCall, k_cache: Tensor, v_cache: Tensor, page: int) -> _Boxes | None:
    """None where pages and heads are not whole rows, or columns, apart, or are placed otherwise in V than in K."""
    stride_b, stride_t, stride_h, *_ = call.strides.k
    if call.strides.k[:3] != call.strides.v[:3] or len(k_cache) == 0 or stride_t == 0 or stride_b % stride_t:
        return None
    sizes, last_head = call.sizes, call.sizes["num_kv_heads"] - 1
    columns_h = stride_h if 0 < stride_h < stride_t and last_head > 0 else 0
    if columns_h == 0 and last_head > 0 and stride_h % stride_t:
        return None
    rows_b, rows_h = stride_b // stride_t, 0 if columns_h or last_head == 0 else stride_h // stride_t
    num_rows = (len(k_cache) - 1) * rows_b + last_head * rows_h + sizes["block_size"]
    if num_rows >= _MOST_OFFSET:
        return None
    from triton.experimental.gluon import language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    shared = language.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shape = [num_rows, last_head * columns_h + sizes["head_size"]]
    d_k, d_v = (
        TensorDescriptor(one, shape, [stride_t, 1], [page, _COLUMNS_OF_A_BOX], shared) for one in (k_cache, v_cache)
    )
    return _Boxes(d_k, d_v, rows_b, rows_h, columns_h)


def launch_on_hopper(
    call: PagedCall,
    inputs: tuple[Tensor, ...],
    scale: float,
    layout: str,
    max_query_len: int,
    max_seq_len: int,
    processors: int,
    **options: int,
) -> None:
    """Write ``out`` and ``lse``. A program for each multiprocessor, whose shared memory it fills."""
    kernel: Any = _kernel()
    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q = inputs
    sizes, strides = call.sizes, call.strides
    num_seqs, num_kv_heads, group = sizes["num_seqs"], sizes["num_kv_heads"], sizes["group_size"]
    block_size = sizes["block_size"]
    num_blocks = sizes["num_tokens"] // (_BLOCK_M // group) + num_seqs
    is_power_of_two = block_size & (block_size - 1) == 0
    in_chunks = is_power_of_two and block_size >= _CHUNK
    # The host knows this much: were all sequences as long as the longest, none would be a decode.
    are_mixed = sizes["num_tokens"] < num_seqs * max_query_len
    are_short = max_query_len <= _SHORT and (are_mixed or max_seq_len <= _SHORT)
    chosen = (_OF_SHORT if are_short else _OF_LONG) | options
    by_tma = chosen.pop("by_tma")
    page = min(block_size, chosen["TILE"]) if in_chunks else 0
    boxes = _boxes(call, k_cache, v_cache, page) if page and by_tma else None
    if are_mixed:
        grouped_decode(
            q, k_cache, v_cache, block_table, seq_lens, scale, block_size, layout,
            out=call.out, lse=call.lse, cu_seqlens_q=cu_seqlens_q,
        )  # fmt: skip
    with on_device_of(q):
        kernel[(min(processors, num_blocks * num_kv_heads),)](
            q, *q.stride()[:2], k_cache, *strides.k[:3], v_cache, *strides.v[:3],
            block_table, block_table.stride(0), seq_lens, cu_seqlens_q,
            call.out, *call.out.stride()[:2], call.lse, *call.lse.stride(),
            scale * math.log2(math.e), num_seqs, num_kv_heads, block_size, 2 if are_mixed else 1,
            GROUP=group, HEAD_SIZE=sizes["head_size"], CONSUMERS=2, REGISTERS=216, REGISTERS_P=72,
            PAGE=page, BLOCK_SIZE=block_size if is_power_of_two else 0,
            BLOCK_S=max(_LEAST_COUNTED, triton.next_power_of_2(num_seqs)),
            SAME_STRIDES=strides.k[:2] == strides.v[:2], BY_TMA=boxes is not None,
            **(_NO_BOXES if boxes is None else boxes._asdict()), **chosen,
            num_warps=4,
        )  # fmt: skip
