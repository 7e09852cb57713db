"""When ``grouped_decode`` goes to the kernel for Hopper, and how that is launched."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnfuzz.kernels.common.checks import check_grid, check_positive
from attnfuzz.kernels.common.device import GpuLimits, count_sms, on_device_of
from attnfuzz.kernels.common.launch_again import launch_again
from attnfuzz.kernels.common.prepare import PagedCall
from attnfuzz.kernels.common.variants import Variant
from attnfuzz.kernels.grouped.combine_partials import combine_partials_kernel
from attnfuzz.kernels.grouped.plan_splits import MOST_COUNTED, plan_splits, sequences_counted

__all__ = ["is_for_hopper", "launch_on_hopper"]

_HOPPER = (9, 0)
_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_SIZES = (64, 128, 256)
_COLUMNS = 8
"""Query heads that matrix units take at a time. Accumulators of three times as many do not fit into registers."""
_BYTES_OF_A_COPY = 16
_MOST = 1 << 31
_WARPS, _STAGES, _FILL = 2, 3, 4
"""``_FILL``: programs that a multiprocessor gets, as many as its registers hold."""
_MOST_TOKENS, _TILE_ELEMENTS = 32, 4096
"""Tokens of a warp in a tile, and numbers of them in K, and in V: registers hold no more of what is made of them."""
_LEAST_TILE = _WARPS * _TILE_ELEMENTS // max(_HEAD_SIZES)
_COMBINED_ELEMENTS = 8192
"""Of partial outputs, in one step of a program."""
_PDL = {"launch_pdl": True}


class _Plan(NamedTuple):
    """``tokens``: of a warp in a tile. ``states``: of a head, to be combined; 0 where no sequence is split."""

    tokens: int
    num_splits: int
    balanced: bool
    states: int
    chunk: int


@cache
def _kernel() -> Any | None:
    """Gluon is no part of Triton before 3.4, and may change: without it ``grouped_decode`` is as on other GPUs."""
    try:
        from attnfuzz.kernels.grouped.grouped_hopper import grouped_hopper_kernel
    except (ImportError, AttributeError):
        return None
    return grouped_hopper_kernel


def is_for_hopper(
    gpu: GpuLimits | None, q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, call: PagedCall,
    num_splits: int | None, fill: int | None,
) -> bool:  # fmt: skip
    """Whether this is an 8-bit cache of the sizes and strides that the kernel knows, and the GPU is Hopper itself.

    Rows are copied in pieces of 16 bytes, and pages of a power of two need no division. What goes beyond plain
    attention is left to Triton, and so are batches of more tiles and splits than 32 bits count.
    """
    if gpu is None or gpu.capability != _HOPPER or k_cache.element_size() != 1:
        return False
    sizes, places = call.sizes, (call.strides.k[:4], call.strides.v)
    block_size, head_size = sizes["block_size"], sizes["head_size"]
    tiles = sizes["num_seqs"] * (table.shape[1] * block_size // _LEAST_TILE + 1)
    most_splits = max(num_splits or 0, (fill or _FILL) * gpu.processors)
    return (
        q.dtype in _DTYPES
        and call.variant._replace(k_scale=None, v_scale=None) == Variant()
        and call.strides.x == 1
        and head_size == sizes["v_head_size"]
        and head_size in _HEAD_SIZES
        and sizes["group_size"] <= 2 * _COLUMNS
        and block_size & (block_size - 1) == 0
        and 0 < sizes["num_seqs"] <= MOST_COUNTED
        and tiles * most_splits < _MOST
        and table.dtype == torch.int32
        and all(one.stride(-1) == 1 for one in (q, k_cache, v_cache, table, lens, call.out))
        and all(one.data_ptr() % _BYTES_OF_A_COPY == 0 for one in (k_cache, v_cache))
        and all(one % _BYTES_OF_A_COPY == 0 and one < _MOST for strides in places for one in strides[:3])
        and _kernel() is not None
    )


@lru_cache(maxsize=1024)
def _plan(
    num_seqs: int, num_kv_heads: int, head_size: int, num_tokens: int, processors: int,
    num_splits: int | None, fill: int | None, balanced: bool | None,
) -> _Plan:  # fmt: skip
    tokens = min(_MOST_TOKENS, _TILE_ELEMENTS // head_size)
    tiles = triton.cdiv(num_tokens, _WARPS * tokens)
    check_positive("fill", _FILL if fill is None else fill)
    if num_splits is not None and balanced is None:
        balanced = False
    planned, balanced = plan_splits(num_seqs, num_kv_heads, tiles, processors, fill or _FILL, balanced)
    num_splits = planned if num_splits is None else num_splits
    check_positive("num_splits", num_splits)
    check_grid("num_splits", num_splits, "use 64")
    states = num_seqs + num_splits if balanced else num_seqs * num_splits if num_splits > 1 else 0
    of_each = max(16, 2 * num_splits // num_seqs) if balanced else num_splits
    return _Plan(
        tokens, num_splits, balanced, states, min(_COMBINED_ELEMENTS // head_size, triton.next_power_of_2(of_each))
    )


def launch_on_hopper(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, scale: float, call: PagedCall,
    num_splits: int | None, fill: int | None, balanced: bool | None,
) -> None:  # fmt: skip
    """Write ``out`` and ``lse``. Raises ValueError."""
    sizes, strides, (out, lse) = call.sizes, call.strides, call.results
    num_seqs, num_q_heads, head_size = q.shape
    num_kv_heads, block_size = sizes["num_kv_heads"], sizes["block_size"]
    plan = _plan(
        num_seqs, num_kv_heads, head_size, table.shape[1] * block_size, count_sms(q), num_splits, fill, balanced,
    )  # fmt: skip
    scales = call.variant.of_scores
    states = (num_q_heads, plan.states)
    partials = (
        *(torch.empty(shape, dtype=torch.float32, device=q.device) for shape in ((*states, head_size), states, states)),
        torch.empty((num_seqs, 2), dtype=torch.int32, device=q.device),
    )
    results = (out, *out.stride(), lse, *lse.stride())
    with on_device_of(q):
        launch_again(
            _kernel(), (num_kv_heads if plan.balanced else num_seqs * num_kv_heads, plan.num_splits, 1),
            (
                q, *q.stride()[:2], k_cache, *strides.k[:3], v_cache, *strides.v[:3], table, table.stride(0), lens,
                out, *out.stride()[:2], lse, *lse.stride(),
                scales["p_k_scale"], scales["stride_k_scale"], scales["p_v_scale"], scales["stride_v_scale"],
                *partials, scale * math.log2(math.e), num_seqs, plan.num_splits, num_kv_heads, sizes["group_size"],
                block_size.bit_length() - 1, head_size, strides.k[:2] == strides.v[:2],
                _COLUMNS * triton.cdiv(sizes["group_size"], _COLUMNS), plan.tokens, _STAGES,
                sequences_counted(num_seqs) if plan.balanced else 0,
            ),
            {}, {"num_warps": _WARPS, "enable_fp_fusion": False, **_PDL},
        )  # fmt: skip
        if plan.states:
            launch_again(
                combine_partials_kernel, (num_seqs * num_q_heads, 1, 1), (lens, *lens.stride(), *partials, *results),
                {
                    "p_cu_seqlens": None, "stride_cu": 0, "p_sinks": None, "stride_sink": 0,
                    "num_splits": plan.states, "num_q_heads": num_q_heads,
                    "v_head_size": head_size, "window": None, "TILE": _WARPS * plan.tokens, "BLOCK_DV": head_size,
                    "CHUNK": plan.chunk, "SHARED_OUT": True, "PDL": True, "HEADS": 1,
                },
                {"num_warps": 2, **_PDL},
            )  # fmt: skip
