"""Checked wrapper of grouped paged decode: how many splits, how large a tile, and the memory between both kernels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Unpack

import torch
import triton
from torch import Tensor

from attnfuzz.kernels.common.checks import check_grid, check_launch, check_positive, check_power_of_two
from attnfuzz.kernels.common.device import GpuLimits, gpu_at, on_device_of
from attnfuzz.kernels.common.launch_again import launch_again
from attnfuzz.kernels.common.matrix_units import LEAST_FOR_DOT, block_columns, num_tiles, tiles_in_shared_memory
from attnfuzz.kernels.common.prepare import prepare_paged
from attnfuzz.kernels.common.variants import Variants, sink_arguments
from attnfuzz.kernels.grouped.combine_partials import combine_partials_kernel
from attnfuzz.kernels.grouped.grouped_decode import grouped_decode_kernel
from attnfuzz.kernels.grouped.launch_hopper import is_for_hopper, launch_on_hopper
from attnfuzz.kernels.grouped.plan_splits import MOST_COUNTED, plan_splits, sequences_counted
from attnfuzz.kernels.tuned import measured_choice

_DTYPES = (torch.float16, torch.bfloat16)
_MOST_HEADS = 64
_MOST_ELEMENTS = 16384
"""Query heads of one program, and elements of its accumulator. Larger groups are shared out."""
_WIDE = 512
"""Columns beyond which a program reads so much for each token that more heads of a group are worth twice the warps."""
_ENOUGH_PROGRAMS = 0.1
"""Share of the processors before sequences are split, so that such heads need not be shared out."""
_ENOUGH_TOKENS = 16384
"""Tokens of all sequences likewise: 16 of 512 take twice as long with 64 heads in a program as with 16."""
_CHUNK_ELEMENTS = 8192
"""Partial outputs that a program combines in one step: 128 registers of each of 64 threads."""
_WARPS_OF_COMBINATION = 2
"""64 splits of 128 elements: 6.5 us in all at one sequence of 4,096 tokens with 2 KV heads, and 7.1 with four warps."""
_SHARED_BYTES = 160 << 10
"""Bytes of the tiles on their way at a time; a multiprocessor of an A100 has 164 KiB, of an H100 228."""
_SHORT = 2048
"""Tokens of the longest sequence."""
_FILL_OF_RANGES = 3
"""Programs of a multiprocessor that take a range of all tiles: as many as its registers hold."""
_PROCESSORS_OF_A_CPU = 8
"""In the interpreter, so that there are splits."""
_SECOND_KERNEL = {"LAST_COMBINES": False, "BLOCK_G": 1, "CHUNK": 1}


class GroupedPlan(NamedTuple):
    """How ``grouped_decode`` is launched.

    ``pdl``: with programmatic dependent launch, where the GPU has it. ``balanced``: splits are shared out by length.
    """

    num_splits: int
    tile: int
    num_warps: int
    num_stages: int
    pdl: bool
    balanced: bool


def plan_grouped(
    num_seqs: int,
    head_programs: int,
    max_seq_len: int,
    processors: int,
    columns: int,
    kv_itemsize: int = 2,
    *,
    fill: int | None = None,
    balanced: bool | None = None,
) -> GroupedPlan:
    """The launch for a batch on a GPU with so many ``processors``.

    ``head_programs``: blocks of query heads, of all KV heads. ``max_seq_len``: what the block table has room for, since
    the lengths are on the GPU. ``columns``: the larger head size rounded up to a power of two; ``kv_itemsize``: bytes
    of a number in the cache. ``fill``: programs that each multiprocessor should get.

    Where four small programs share a multiprocessor, each waits for its own tiles while the others have some (H100).
    Larger heads leave room for two. With two stages a tile is asked for only when the last one is used up; with three
    the memory of an H200 has enough to do. Short sequences end at different times, and twice as many splits fill what
    that leaves. Where a sequence may be so long that its splits have many tiles, all tiles are shared out in equal
    ranges, of which all run at once (``find_range``): that takes two microseconds, but then a batch takes as long as
    its tokens together ask for, and not as long as its longest sequence does.
    """
    row_bytes = columns * kv_itemsize
    tile = 64 if row_bytes <= 128 else 32 if row_bytes <= 512 else LEAST_FOR_DOT
    usual = 4 if row_bytes <= 256 and kv_itemsize > 1 else 2
    tiles = triton.cdiv(max_seq_len, tile)
    num_splits, balanced = plan_splits(num_seqs, head_programs, tiles, processors, fill or usual, balanced)
    leaves_gaps = num_seqs > 1 and max_seq_len <= _SHORT and num_seqs * head_programs <= 2 * processors
    if leaves_gaps and not balanced and fill is None:
        num_splits, _ = plan_splits(num_seqs, head_programs, tiles, processors, 2 * usual, balanced)
    if balanced and fill is None:
        num_splits, _ = plan_splits(num_seqs, head_programs, tiles, processors, min(usual, _FILL_OF_RANGES), True)
    return GroupedPlan(num_splits, tile, num_warps=4, num_stages=3, pdl=True, balanced=balanced)


def grouped_decode(
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
    num_splits: int | None = None,
    tile: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    pdl: bool | None = None,
    block_m: int | None = None,
    num_combined: int | None = None,
    fill: int | None = None,
    balanced: bool | None = None,
    tuned: bool = True,
    counters: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    **variants: Unpack[Variants],
) -> tuple[Tensor, Tensor]:
    """``paged.launch.paged_decode`` at the speed of memory, in float16 or bfloat16.

    Arguments and result as there. ``num_splits``: programs that share a sequence, at most; where it is not given,
    ``fill`` is how many programs a multiprocessor should get. ``balanced``: not each sequence gets as many, but the
    GPU shares the tiles of all of them out among ``num_splits``, by their lengths, which only the GPU knows. ``tile``
    and ``num_stages`` are taken as far as they fit into shared memory. ``pdl``: programmatic dependent launch. What is
    not given is chosen as it was measured on this GPU, if it was and ``tuned`` does not forbid it, or else by
    ``plan_grouped``. ``block_m``: query heads of a program, a power of two, at least 16 and as far as registers hold
    its accumulator; larger groups are shared out. ``num_combined``: splits that are combined in one step, a power of
    two, as far as registers hold them.

    ``counters [num_seqs, num_q_heads]`` int32, contiguous and zero: with it there is no second kernel, since the last
    program of a sequence's splits combines them. It is zero again afterwards, so one tensor serves any number of calls
    one after the other, but none that run at the same time.

    ``cu_seqlens_q [num_seqs + 1]``: of a batch of prompts and decodes, where the queries of each sequence begin in q.
    What has one query is computed, and the rows of all others are left as they are; no ``counters`` then, and no
    ``num_splits``. Raises ValueError.
    """
    call = prepare_paged(
        q, k_cache, v_cache, block_table, seq_lens, block_size, layout, out, lse, variants, cu_seqlens_q
    )  # fmt: skip
    (out, lse), sizes, window = call.results, call.sizes, call.variant.window
    of_the_loop = (tile, num_warps, num_stages, pdl, block_m, num_combined, counters, cu_seqlens_q)
    tensors = (q, k_cache, v_cache, block_table, seq_lens)
    if all(one is None for one in of_the_loop) and is_for_hopper(gpu_at(q.device), *tensors, call, num_splits, fill):
        launch_on_hopper(*tensors, float(scale), call, num_splits, fill, balanced)
        return out, lse
    num_seqs, (_, num_q_heads, head_size) = sizes["num_seqs"], q.shape
    if cu_seqlens_q is not None:
        _check_mixed(num_seqs, num_splits, balanced, counters)
        balanced = True
    v_head_size = sizes["v_head_size"]
    num_tokens = block_table.shape[1] * block_size
    num_tokens = num_tokens if window is None else min(num_tokens, window)
    launch = _launch(
        num_seqs, num_q_heads, sizes["num_kv_heads"], head_size, v_head_size, num_tokens,
        q.dtype, k_cache.element_size(), q.device, num_splits, tile, num_warps, num_stages, pdl, block_m, num_combined,
        fill, balanced, tuned,
    )  # fmt: skip
    num_splits = launch.num_splits
    if counters is not None:
        _check_counters(counters, q)
    rows: tuple[int, ...] = (0,)
    if num_splits > 1:
        rows = (num_q_heads, num_seqs + num_splits) if launch.balanced else (num_seqs, num_q_heads, num_splits)
    partials = (
        *(torch.empty(shape, dtype=torch.float32, device=q.device) for shape in ((*rows, v_head_size), rows, rows)),
        torch.empty((num_seqs, 2) if launch.balanced else (0,), dtype=torch.int32, device=q.device),
    )
    queries = {"p_cu_seqlens": cu_seqlens_q, "stride_cu": 0 if cu_seqlens_q is None else cu_seqlens_q.stride(0)}
    lengths, results = (seq_lens, *seq_lens.stride()), (out, *out.stride(), lse, *lse.stride())
    head_blocks = sizes["num_kv_heads"] * launch.head_blocks
    grid = (head_blocks if launch.balanced else num_seqs * head_blocks, num_splits, 1)
    with on_device_of(q):
        launch_again(
            grouped_decode_kernel, grid,
            (
                q, *q.stride(), k_cache, *call.strides.k, v_cache, *call.strides.v,
                block_table, *block_table.stride(), *lengths, *results, *partials, counters,
                float(scale), num_seqs, num_splits, sizes["num_kv_heads"], sizes["group_size"],
                launch.head_blocks, block_size, head_size, v_head_size, block_table.shape[1],
            ),
            {
                "X": call.strides.x, "SAME_STRIDES": call.strides.k[:2] == call.strides.v[:2],
                **launch.of_splits, **(_SECOND_KERNEL if counters is None else launch.of_last),
                **call.variant.of_rows, **queries,
            },
            launch.options,
        )  # fmt: skip
        if num_splits > 1 and counters is None:
            launch_again(
                combine_partials_kernel, (num_seqs * num_q_heads, 1, 1),
                (*lengths, *partials, *results),
                {
                    "num_splits": rows[-1], "num_q_heads": num_q_heads, "v_head_size": v_head_size, "window": window,
                    **sink_arguments(call.variant.sinks), **queries, **launch.of_combination,
                },
                launch.options_of_combination,
            )  # fmt: skip
    return out, lse


class _Launch(NamedTuple):
    """Arguments that follow from shapes and options.

    ``head_blocks``: programs that share the query heads of a KV head.
    ``of_splits``, ``of_combination``: constants of the two kernels. ``of_last``: of the first without the second. The
    ``options`` are those of ``triton.Config``.
    """

    head_blocks: int
    num_splits: int
    balanced: bool
    of_splits: Mapping[str, Any]
    of_combination: Mapping[str, Any]
    of_last: Mapping[str, Any]
    options: Mapping[str, Any]
    options_of_combination: Mapping[str, Any]


@lru_cache(maxsize=1024)
def _launch(
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    v_head_size: int,
    num_tokens: int,
    dtype: torch.dtype,
    kv_itemsize: int,
    device: torch.device,
    num_splits: int | None,
    tile: int | None,
    num_warps: int | None,
    num_stages: int | None,
    pdl: bool | None,
    block_m: int | None,
    num_combined: int | None,
    fill: int | None = None,
    balanced: bool | None = None,
    tuned: bool = True,
) -> _Launch:
    """Computed once: eager decoding is as fast as the host can launch. Raises ValueError."""
    if dtype not in _DTYPES:
        raise ValueError(f"q.dtype={dtype} must be one of {_DTYPES}, for matrix units; use paged_decode")
    group_size = num_q_heads // num_kv_heads
    widest = triton.next_power_of_2(max(head_size, v_head_size))
    most_heads = max(LEAST_FOR_DOT, min(_MOST_HEADS, _MOST_ELEMENTS // widest))
    check_power_of_two("block_m", most_heads if block_m is None else block_m)
    gpu = gpu_at(device)
    is_wide = gpu is not None and gpu.is_hopper and widest > _WIDE >= v_head_size
    if is_wide and gpu is not None and num_seqs * num_tokens >= _ENOUGH_TOKENS:
        most_heads = _MOST_HEADS
        while most_heads > LEAST_FOR_DOT and block_m is None:
            if num_seqs * num_kv_heads * triton.cdiv(group_size, most_heads) >= _ENOUGH_PROGRAMS * gpu.processors:
                break
            most_heads //= 2
    block_m = max(LEAST_FOR_DOT, min(most_heads, block_m or most_heads, triton.next_power_of_2(group_size)))
    block_d, block_dv = (block_columns(size, block_m) for size in (head_size, v_head_size))
    head_blocks = triton.cdiv(group_size, block_m)
    processors = _PROCESSORS_OF_A_CPU if gpu is None else gpu.processors
    check_positive("fill", 1 if fill is None else fill)
    measured = measured_choice(
        "paged_grouped_auto",
        gpu if tuned and kv_itemsize == dtype.itemsize else None,
        batch=num_seqs,
        max_seq_len=num_tokens,
        heads_per_group=group_size,
        head_size=max(head_size, v_head_size),
        max_query_len=1,
        rows=group_size,
        pairs=num_seqs * num_kv_heads,
    )
    if balanced is None and num_splits is not None:
        balanced = False
    measured_fill, measured_balanced = measured.pop("fill", None), measured.pop("balanced", None)
    plan = plan_grouped(
        num_seqs, num_kv_heads * head_blocks, num_tokens, processors, max(block_d, block_dv), kv_itemsize,
        fill=measured_fill if fill is None else fill,
        balanced=measured_balanced if balanced is None else balanced,
    )._replace(**measured)  # fmt: skip
    if is_wide and block_m > LEAST_FOR_DOT:
        plan = plan._replace(tile=32, num_warps=8)
    num_splits = plan.num_splits if num_splits is None else num_splits
    check_positive("num_splits", num_splits)
    check_grid("num_splits", num_splits, "use 64")
    tile = plan.tile if tile is None else tile
    check_power_of_two("tile", tile)
    token_bytes = (block_d + block_dv) * dtype.itemsize
    tile = max(LEAST_FOR_DOT, min(tile, triton.next_power_of_2(_SHARED_BYTES // token_bytes + 1) // 2))
    num_stages = plan.num_stages if num_stages is None else num_stages
    warps_and_stages = check_launch(
        plan.num_warps if num_warps is None else num_warps,
        max(1, min(num_stages, _SHARED_BYTES // (tile * token_bytes) + 1)),
    )
    while gpu is not None and not _fits(gpu, block_m, block_d, tile, token_bytes, warps_and_stages["num_stages"]):
        if warps_and_stages["num_stages"] > 2:
            warps_and_stages["num_stages"] -= 1
        elif tile > LEAST_FOR_DOT:
            tile //= 2
        else:
            warps_and_stages["num_stages"] = 1
            break
    most = max(1, _CHUNK_ELEMENTS // block_dv)
    check_power_of_two("num_combined", most if num_combined is None else num_combined)
    # Of most sequences there are few splits, even where one has many: programs that hold less are more at a time.
    of_each = max(16, 2 * num_splits // max(1, num_seqs)) if plan.balanced else num_splits
    chunk = min(most, num_combined or most, triton.next_power_of_2(of_each))
    pdl = gpu is not None and gpu.is_hopper and (plan.pdl if pdl is None else pdl)
    own_v = v_head_size != head_size
    of_ranges = {
        "BLOCK_S": sequences_counted(num_seqs) if plan.balanced else 0,
        "PREFETCH": plan.balanced and gpu is not None and not gpu.is_amd,
    }
    whole = {"WHOLE_BLOCKS": (head_size, v_head_size) == (block_d, block_dv)}
    both = {"TILE": tile, "BLOCK_DV": block_dv, "PDL": pdl}
    dependent = {"launch_pdl": True} if pdl else {}
    block_g = min(block_m, triton.next_power_of_2(group_size))
    # More would be more registers than two programs of a multiprocessor have.
    elements = _CHUNK_ELEMENTS if warps_and_stages["num_warps"] <= 4 else _CHUNK_ELEMENTS // 4
    in_one_step = max(1, min(chunk, elements // (block_g * block_dv)))
    return _Launch(
        head_blocks=head_blocks,
        num_splits=num_splits,
        balanced=plan.balanced,
        of_splits={"BLOCK_M": block_m, "BLOCK_D": block_d, "OWN_V": own_v, **whole, **of_ranges, **both},
        of_combination={"CHUNK": chunk, "SHARED_OUT": plan.balanced, "HEADS": 1, **both},
        of_last={"LAST_COMBINES": True, "BLOCK_G": block_g, "CHUNK": in_one_step},
        options={**warps_and_stages, **dependent},
        options_of_combination={"num_warps": _WARPS_OF_COMBINATION, **dependent},
    )


def _fits(gpu: GpuLimits, block_m: int, block_d: int, tile: int, token_bytes: int, num_stages: int) -> bool:
    most = tiles_in_shared_memory(gpu, rows=block_m, columns=block_d, tile=tile, row_bytes=token_bytes, itemsize=2)
    return num_tiles(gpu, rows=block_m, num_stages=num_stages) <= most


def _check_mixed(num_seqs: int, num_splits: int | None, balanced: bool | None, counters: Tensor | None) -> None:
    if num_splits is not None or balanced is False or counters is not None:
        raise ValueError(
            f"num_splits={num_splits}, balanced={balanced} and counters cannot be chosen with cu_seqlens_q, since "
            "decodes among prompts are shared out by length; leave them out"
        )
    if num_seqs > MOST_COUNTED:
        raise ValueError(f"num_seqs={num_seqs} must be at most {MOST_COUNTED} with cu_seqlens_q; use q_block")


def _check_counters(counters: Tensor, q: Tensor) -> None:
    if counters.shape != q.shape[:2] or counters.dtype != torch.int32 or not counters.is_contiguous():
        raise ValueError(
            f"counters.shape={list(counters.shape)}, {counters.dtype}, strides {counters.stride()}, must be "
            f"[num_seqs, num_q_heads]={list(q.shape[:2])}, torch.int32 and contiguous; make them with torch.zeros"
        )
    if counters.device != q.device:
        raise ValueError(f"counters.device={counters.device} must be {q.device}, that of q; make them there")
