"""Checked wrappers of the kernels for multi-head latent attention: over a paged cache, for one query token
of each sequence or several, and over lists of slots, and of the top-k that makes these.

As in ``launch``: results are allocated unless given, strides are honoured, nothing waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from attnfuzz.kernels.common.checks import (
    LATENT,
    check_grid,
    check_launch,
    check_positive,
    check_power_of_two,
    check_tensors,
)
from attnfuzz.kernels.common.device import GpuLimits, gpu_at, on_device_of
from attnfuzz.kernels.common.matrix_units import LEAST_FOR_DOT, block_columns, num_tiles, tiles_in_shared_memory
from attnfuzz.kernels.common.variants import Variant, check_variant
from attnfuzz.kernels.grouped.combine_partials import combine_partials_kernel
from attnfuzz.kernels.grouped.plan_splits import plan_splits, sequences_counted
from attnfuzz.kernels.latent.indexer_topk import indexer_topk_kernel
from attnfuzz.kernels.latent.latent_decode import latent_decode_kernel
from attnfuzz.kernels.latent.latent_verify import latent_verify_kernel
from attnfuzz.kernels.latent.launch_hopper import is_for_hopper, launch_on_hopper
from attnfuzz.kernels.latent.sparse_decode import sparse_decode_kernel

_MOST_HEADS = 64
"""With 512 columns their accumulator takes half of the registers of eight warps."""
_FILL = 2
"""Programs of 16 heads that a multiprocessor should get, which has shared memory for two; of more heads it has one."""
_COMBINED_ELEMENTS = 8192
"""Of partial outputs, in one step: as ``grouped_decode`` has it."""
_COMBINED_COLUMNS = 64
"""Of a row, by one program. One for all 512 of a row reads 264 splits for longer than all of them were computed in."""
_WARPS_OF_COMBINATION = 2
_PROCESSORS_OF_A_CPU = 8
"""In the interpreter, so that there are splits."""


class _Plan(NamedTuple):
    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    fill: int


def _plan(gpu: GpuLimits | None, num_q_heads: int) -> _Plan:
    """The launch of a program, which reads the cache for its heads once: as many as registers hold.

    Products of 64 heads go to a warp group, which takes a tile from where it was loaded to. Those of fewer are copied
    to registers first, and a tile of a launch of two stages would not be asked for before the last one was used up.
    """
    if gpu is None or not gpu.is_hopper:
        return _Plan(LEAST_FOR_DOT, 32, 4, 2, _FILL)
    block_m = max(LEAST_FOR_DOT, min(_MOST_HEADS, triton.next_power_of_2(num_q_heads)))
    if block_m < _MOST_HEADS:
        return _Plan(block_m, 32, 4, 3, _FILL)
    return _Plan(block_m, 64, 8, 2, 1)


def _plan_lists(gpu: GpuLimits | None, num_heads: int, *, has_scales: bool) -> _Plan:
    """As ``_plan``, with blocks of two sizes. Rows of 8 bits pass registers, of which a program then has all."""
    if gpu is None or not gpu.is_hopper:
        return _plan(gpu, num_heads)
    plan = _plan(gpu, LEAST_FOR_DOT if num_heads <= LEAST_FOR_DOT else _MOST_HEADS)
    return plan._replace(tile=32, num_warps=8, num_stages=3, fill=1) if has_scales else plan


def _check_blocks(tile: int, block_m: int) -> None:
    for name, value in (("tile", tile), ("block_m", block_m)):
        check_power_of_two(name, value)
        if value < LEAST_FOR_DOT:
            raise ValueError(f"{name}={value} must be at least {LEAST_FOR_DOT}, as tl.dot wants it; choose 16 or 32")


def _fitting(gpu: GpuLimits, tile: int, num_stages: int, block_m: int, columns: int) -> tuple[int, int]:
    """As far as they fit into shared memory. One tile serves as K and V, so that a token has its row once."""

    def most(tile: int) -> int:
        return tiles_in_shared_memory(gpu, rows=block_m, columns=columns, tile=tile, row_bytes=2 * columns, itemsize=2)

    while tile > LEAST_FOR_DOT and most(tile) < 1:
        tile //= 2
    while num_stages > 1 and num_tiles(gpu, rows=block_m, num_stages=num_stages) > most(tile):
        num_stages -= 1
    return tile, num_stages


def latent_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    v_head_size: int,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    soft_cap: float | None = None,
    num_splits: int | None = None,
    tile: int | None = None,
    block_m: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    fill: int | None = None,
    balanced: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query token per sequence to a paged cache of latent vectors, which all query heads share.

    Shapes: ``q [num_seqs, num_q_heads, head_size]``, ``kv_cache [num_blocks, block_size, head_size]``, both float16 or
    bfloat16; ``block_table [num_seqs, max_blocks_per_seq]`` and ``seq_lens [num_seqs]``, int32 or int64. A token's key
    is its row of the cache, its value the first ``v_head_size`` numbers of that. ``soft_cap``: what scores are capped
    at, None for no cap. ``num_splits``: programs that share a sequence, at most, ``fill`` and ``balanced``: how many
    there should be and whether they are shared out by length, all three as ``grouped_decode`` has them. ``tile``:
    tokens per step, ``block_m``: query heads of a program, both powers of two of at least 16. ``tile`` and
    ``num_stages`` are taken as far as they fit into the GPU's shared memory.

    Returns ``out [num_seqs, num_q_heads, v_head_size]`` in q's dtype and ``lse [num_seqs, num_q_heads]`` float32,
    natural log: 0 and -inf for a sequence without tokens. Raises ValueError.
    """
    check_variant(Variant(soft_cap=soft_cap))
    check_positive("v_head_size", v_head_size)
    rows = q.shape[:-1]
    out = torch.empty((*rows, v_head_size), dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(rows, dtype=torch.float32, device=q.device) if lse is None else lse
    tensors = {"q": q, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens, "out": out, "lse": lse}
    sizes = check_tensors(tensors, LATENT)
    if sizes["v_head_size"] != v_head_size or v_head_size > sizes["head_size"]:
        raise ValueError(
            f"v_head_size={v_head_size} must be out.shape[2]={sizes['v_head_size']}, and at most "
            f"head_size={sizes['head_size']}, since values are the first numbers of keys; pass the rank of the latents"
        )
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"q.dtype={q.dtype} must be torch.float16 or torch.bfloat16; convert it with q.to()")
    gpu = gpu_at(q.device)
    processors = _PROCESSORS_OF_A_CPU if gpu is None else gpu.processors
    given = (num_splits, tile, block_m, num_warps, num_stages, fill, balanced)
    if soft_cap is None and all(one is None for one in given) and is_for_hopper(gpu, tensors, sizes):
        launch_on_hopper(tensors, sizes, scale, processors)
        return out, lse
    num_seqs, num_q_heads, block_size = sizes["num_seqs"], sizes["num_q_heads"], sizes["block_size"]
    plan = _plan(gpu, num_q_heads)
    block_m = plan.block_m if block_m is None else block_m
    tile = plan.tile if tile is None else tile
    num_warps = plan.num_warps if num_warps is None else num_warps
    num_stages = plan.num_stages if num_stages is None else num_stages
    _check_blocks(tile, block_m)
    check_launch(num_warps, num_stages)
    check_positive("fill", 1 if fill is None else fill)
    rope_size = sizes["head_size"] - v_head_size
    block_r, block_p = (block_columns(size, block_m) for size in (v_head_size, max(1, rope_size)))
    if gpu is not None:
        tile, num_stages = _fitting(gpu, tile, num_stages, block_m, block_r + block_p)
    head_blocks = triton.cdiv(num_q_heads, block_m)
    tiles = triton.cdiv(block_table.shape[1] * block_size, tile)
    if num_splits is not None or 4 * num_seqs * head_blocks >= 3 * processors:  # whole sequences nearly fill the GPU
        balanced = bool(balanced)
    planned, balanced = plan_splits(
        num_seqs, head_blocks, tiles, processors, plan.fill if fill is None else fill, balanced
    )
    num_splits = planned if num_splits is None else num_splits
    check_positive("num_splits", num_splits)
    num_splits = max(num_splits, 2 * num_seqs) if balanced else num_splits
    check_grid("num_splits", num_splits, "use 64")
    of_states: tuple[int, ...] = (0,)
    if num_splits > 1:
        of_states = (num_q_heads, num_splits) if balanced else (num_seqs, num_q_heads, num_splits)
    partials = (
        *(
            torch.empty(n, dtype=torch.float32, device=q.device)
            for n in ((*of_states, v_head_size), of_states, of_states)
        ),
        torch.empty((num_seqs, 2) if balanced else (0,), dtype=torch.int32, device=q.device),
    )
    pdl = gpu is not None and gpu.is_hopper
    dependent = {"launch_pdl": True} if pdl else {}
    lengths, results = (seq_lens, *seq_lens.stride()), (out, *out.stride(), lse, *lse.stride())
    with on_device_of(q):
        latent_decode_kernel[(head_blocks if balanced else num_seqs * head_blocks, num_splits)](
            q, *q.stride(), kv_cache, *kv_cache.stride(), block_table, *block_table.stride(), *lengths, *results,
            *partials, float(scale), None if soft_cap is None else float(soft_cap), num_seqs, num_splits, num_q_heads,
            block_size, v_head_size, rope_size, TILE=tile, BLOCK_M=block_m, BLOCK_R=block_r, BLOCK_P=block_p,
            HAS_ROPE=rope_size > 0, WHOLE_TILES=block_size % tile == 0,
            BLOCK_S=sequences_counted(num_seqs) if balanced else 0, PDL=pdl,
            num_warps=num_warps, num_stages=num_stages, **dependent,
        )  # fmt: skip
        if num_splits > 1:
            columns = min(block_r, _COMBINED_COLUMNS)
            chunk = min(_COMBINED_ELEMENTS // columns, triton.next_power_of_2(num_splits))
            combine_partials_kernel[(num_seqs * num_q_heads, triton.cdiv(v_head_size, columns))](
                *lengths, *partials, *results, None, 0, None, 0, num_splits, num_q_heads, v_head_size, None, TILE=tile,
                BLOCK_DV=columns, CHUNK=chunk, SHARED_OUT=balanced, PDL=pdl, HEADS=1,
                num_warps=_WARPS_OF_COMBINATION, **dependent,
            )  # fmt: skip
    return out, lse


_SCALED = 128
"""Numbers of a latent vector in 8 bits that share a scale."""


def sparse_decode(
    q: Tensor,
    latents: Tensor,
    ropes: Tensor,
    indices: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    topk_length: Tensor | None = None,
    num_splits: int | None = None,
    tile: int | None = None,
    block_m: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> None:
    """Attention of each query token to the slots that its list names, into ``out [tokens, num_heads, rank]``.

    Shapes: ``q [tokens, num_heads, rank + rope_size]``, float16 or bfloat16; ``latents [num_slots, 1, rank]`` and
    ``ropes [num_slots, 1, rope_size]``, of the same dtype and as a rule parts of the same rows; ``indices [tokens,
    topk]``, int32 or int64: what is below 0 or no slot names none. A latent vector and a rotary part are a key, and the
    former is the value. ``lse [tokens, num_heads]``: float32, natural logarithm, contiguous. 0 and -inf for a token
    whose list names none. ``scales [num_slots, 1, ceil(rank / 128)]``, float32: ``latents`` are float8 and are
    multiplied with these. ``topk_length [tokens]``, contiguous: how many places of a list count, the others are not
    read. ``num_splits``: programs that share a list, at most; ``tile``: places of a list per step, ``block_m``: query
    heads of a program, both powers of two of at least 16. ``tile`` and ``num_stages`` are taken as far as they fit into
    the GPU's shared memory. What is not given is chosen by the GPU and the shapes. Last dimensions are contiguous.
    Raises ValueError.
    """
    rows, num_heads, head_size = q.shape
    rank, rope_size, topk = latents.shape[-1], ropes.shape[-1], indices.shape[1]
    last = {"q": q, "latents": latents, "ropes": ropes, "indices": indices, "out": out}
    for name, tensor in last.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: the last must be 1; call .contiguous() first")
    if head_size != rank + rope_size or out.shape[-1] != rank:
        raise ValueError(
            f"q.shape[2]={head_size} must be {rank} + {rope_size}, those of latents and ropes, and "
            f"out.shape[2]={out.shape[-1]} the former"
        )
    lse = torch.empty((rows, num_heads), dtype=torch.float32, device=q.device) if lse is None else lse
    gpu = gpu_at(q.device)
    processors = _PROCESSORS_OF_A_CPU if gpu is None else gpu.processors
    given = (scales, num_splits, tile, block_m, num_warps, num_stages)
    if all(one is None for one in given) and _lie_together(latents, ropes):
        tensors = {"q": q, "kv_cache": latents, "block_table": indices, "out": out, "lse": lse}
        tensors |= {} if topk_length is None else {"seq_lens": topk_length}
        sizes = {"num_seqs": rows, "num_q_heads": num_heads, "head_size": head_size, "v_head_size": rank}
        if is_for_hopper(gpu, tensors, sizes):
            launch_on_hopper(tensors, sizes, scale, processors)
            return
    plan = _plan_lists(gpu, num_heads, has_scales=scales is not None)
    block_m = plan.block_m if block_m is None else block_m
    tile = plan.tile if tile is None else tile
    num_warps = plan.num_warps if num_warps is None else num_warps
    num_stages = plan.num_stages if num_stages is None else num_stages
    _check_blocks(tile, block_m)
    check_launch(num_warps, num_stages)
    block_r, block_p = (block_columns(size, block_m) for size in (rank, max(1, rope_size)))
    if gpu is not None:
        tile, num_stages = _fitting(gpu, tile, num_stages, block_m, block_r + block_p)
    head_blocks = triton.cdiv(num_heads, block_m)
    if num_splits is None:
        num_splits, _ = plan_splits(rows, head_blocks, triton.cdiv(topk, tile), processors, plan.fill, False)
    check_positive("num_splits", num_splits)
    num_splits = max(1, min(num_splits, triton.cdiv(topk, tile)))
    check_grid("num_splits", num_splits, "use 64")
    of_states = (rows, num_heads, num_splits) if num_splits > 1 else (0,)
    partials = [
        torch.empty(shape, dtype=torch.float32, device=q.device) for shape in ((*of_states, rank), of_states, of_states)
    ]
    pdl = gpu is not None and gpu.is_hopper
    dependent = {"launch_pdl": True} if pdl else {}
    with on_device_of(q):
        sparse_decode_kernel[(rows * head_blocks, num_splits)](
            q, *q.stride()[:2], latents, latents.stride(0), ropes, ropes.stride(0),
            scales, 0 if scales is None else scales.stride(0), indices, indices.stride(0),
            indices if topk_length is None else topk_length, out, *out.stride()[:2], lse, *partials, float(scale),
            num_heads, len(latents), topk, num_splits, int(topk_length is not None), RANK=rank, ROPE=rope_size,
            SCALED=_SCALED, TILE=tile, BLOCK_M=block_m, BLOCK_R=block_r, BLOCK_P=block_p, PDL=pdl,
            num_warps=num_warps, num_stages=num_stages, **dependent,
        )  # fmt: skip
        if num_splits > 1:
            columns = min(block_r, _COMBINED_COLUMNS)
            chunk = min(_COMBINED_ELEMENTS // columns, triton.next_power_of_2(num_splits))
            combine_partials_kernel[(rows * num_heads, triton.cdiv(rank, columns))](
                topk_length, 1, *partials, None, out, *out.stride(), lse, *lse.stride(), None, 0, None, 0,
                num_splits, num_heads, rank, None, TILE=tile, BLOCK_DV=columns, CHUNK=chunk, SHARED_OUT=False, PDL=pdl,
                HEADS=1, num_warps=_WARPS_OF_COMBINATION, **dependent,
            )  # fmt: skip


def _lie_together(latents: Tensor, ropes: Tensor) -> bool:
    """Whether these are the first and the last numbers of the same rows."""
    end = latents.data_ptr() + latents.shape[-1] * latents.element_size()
    return ropes.data_ptr() == end and ropes.stride(0) == latents.stride(0) and ropes.dtype == latents.dtype


def indexer_topk(scores: Tensor, lengths: Tensor, indices: Tensor, *, tile: int = 1024) -> None:
    """The places of the largest scores of each row, into ``indices [rows, topk]``, int32, in no order.

    Shapes: ``scores [rows, width]``, float32; ``lengths [rows]``, contiguous: how many of these are scores. A row of
    fewer than ``topk`` gets -1 in the last places. NaN is below all other scores; of equal ones the first are named.
    Last dimensions are contiguous. Raises ValueError.
    """
    check_power_of_two("tile", tile)
    for name, tensor in {"scores": scores, "indices": indices}.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: the last must be 1; call .contiguous() first")
    if scores.dtype != torch.float32:
        raise ValueError(f"scores.dtype={scores.dtype} must be torch.float32, which its bits are read as; convert it")
    with on_device_of(scores):
        indexer_topk_kernel[(len(scores),)](
            scores, scores.stride(0), lengths, indices, indices.stride(0), indices.shape[1], TILE=tile
        )


def latent_verify(
    q: Tensor,
    latents: Tensor,
    ropes: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_query_len: int,
    block_size: int,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    scale: float,
    causal: bool = True,
    tile: int = 32,
    block_m: int = LEAST_FOR_DOT,
) -> None:
    """Attention of the last ``cu_seqlens_q[i + 1] - cu_seqlens_q[i]`` tokens of each sequence to all of its tokens.

    Shapes: ``q [tokens, num_heads, rank + rope_size]``, float16 or bfloat16; ``latents [num_slots, 1, rank]`` and
    ``ropes [num_slots, 1, rope_size]``, of the same dtype and as a rule parts of the same rows; ``block_table
    [sequences, pages]``, of ``block_size`` slots each, ``seq_lens [sequences]``, with the new tokens; ``out [tokens,
    num_heads, rank]``, ``lse [tokens, num_heads]``, float32, natural logarithm. ``scales [num_slots, ceil(rank /
    128)]``, float32: ``latents`` are float8 and are multiplied with these. ``max_query_len``: at least the most new
    tokens of any sequence. ``causal``: a query token sees no later one. Last dimensions are contiguous. Raises
    ValueError.
    """
    check_power_of_two("tile", tile)
    check_power_of_two("block_m", block_m)
    last = {"q": q, "latents": latents, "ropes": ropes, "block_table": block_table, "out": out}
    for name, tensor in last.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: the last must be 1; call .contiguous() first")
    num_heads, rank, rope_size = q.shape[1], latents.shape[-1], ropes.shape[-1]
    if q.shape[-1] != rank + rope_size:
        raise ValueError(f"q.shape[2]={q.shape[-1]} must be {rank} + {rope_size}, those of latents and ropes")
    grid = (len(seq_lens), triton.cdiv(max_query_len * num_heads, block_m))
    with on_device_of(q):
        latent_verify_kernel[grid](
            q, q.stride(0), q.stride(1), latents, latents.stride(0), ropes, ropes.stride(0),
            scales, 0 if scales is None else scales.stride(0), block_table, block_table.stride(0),
            seq_lens, cu_seqlens_q, out, out.stride(0), out.stride(1), lse,
            float(scale), num_heads, block_size, int(causal), rank, rope_size, SCALED=_SCALED, TILE=tile,
            BLOCK_M=block_m, BLOCK_R=block_columns(rank, block_m), BLOCK_P=block_columns(rope_size, block_m),
        )  # fmt: skip
