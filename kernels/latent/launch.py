"""Checked wrapper of the kernel for multi-head latent attention.

As in ``launch``: results are allocated unless given, strides are honoured, nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnfuzz.kernels.common.checks import LATENT, check_launch, check_positive, check_power_of_two, check_tensors
from attnfuzz.kernels.common.device import GpuLimits, gpu_at, on_device_of
from attnfuzz.kernels.common.matrix_units import LEAST_FOR_DOT, block_columns, num_tiles, tiles_in_shared_memory
from attnfuzz.kernels.common.variants import Variant, check_variant
from attnfuzz.kernels.latent.latent_decode import latent_decode_kernel

__all__ = ["latent_decode"]

_MOST_HEADS = 64
"""With 512 columns their accumulator takes half of the registers of eight warps."""


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
    tile: int | None = None,
    block_m: int | None = None,
    num_warps: int | None = None,
    num_stages: int = 2,
) -> tuple[Tensor, Tensor]:
    """Attention of one query token per sequence to a paged cache of latent vectors, which all query heads share.

    Shapes: ``q [num_seqs, num_q_heads, head_size]``, ``kv_cache [num_blocks, block_size, head_size]``, both float16 or
    bfloat16; ``block_table [num_seqs, max_blocks_per_seq]`` and ``seq_lens [num_seqs]``, int32 or int64. A token's key
    is its row of the cache, its value the first ``v_head_size`` numbers of that. ``soft_cap``: what scores are capped
    at, None for no cap. ``tile``: tokens per step, ``block_m``: query heads of a program, both powers of two of at
    least 16. ``tile`` and ``num_stages`` are taken as far as they fit into the GPU's shared memory. What is not given
    is chosen as it was measured on an H100.

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
    tile = (32 if gpu is None or not gpu.is_hopper else 64) if tile is None else tile
    num_warps = (4 if gpu is None or not gpu.is_hopper else 8) if num_warps is None else num_warps
    block_m = _heads_of_program(gpu, *rows) if block_m is None else block_m
    for name, value in (("tile", tile), ("block_m", block_m)):
        check_power_of_two(name, value)
        if value < LEAST_FOR_DOT:
            raise ValueError(f"{name}={value} must be at least {LEAST_FOR_DOT}, as tl.dot wants it; choose 16 or 32")
    check_launch(num_warps, num_stages)
    rope_size = sizes["head_size"] - v_head_size
    block_r, block_p = (block_columns(size, block_m) for size in (v_head_size, max(1, rope_size)))
    if gpu is not None:
        # One tile serves as K and V, so that a token has that row once.
        def most(tile: int) -> int:
            columns = block_r + block_p
            return tiles_in_shared_memory(
                gpu, rows=block_m, columns=columns, tile=tile, row_bytes=2 * columns, itemsize=2
            )

        while tile > LEAST_FOR_DOT and most(tile) < 1:
            tile //= 2
        while num_stages > 1 and num_tiles(gpu, rows=block_m, num_stages=num_stages) > most(tile):
            num_stages -= 1
    with on_device_of(q):
        latent_decode_kernel[(sizes["num_seqs"], triton.cdiv(sizes["num_q_heads"], block_m))](
            q, *q.stride(), kv_cache, *kv_cache.stride(), block_table, *block_table.stride(),
            seq_lens, *seq_lens.stride(), out, *out.stride(), lse, *lse.stride(),
            float(scale), None if soft_cap is None else float(soft_cap), sizes["num_q_heads"], sizes["block_size"],
            v_head_size, rope_size, TILE=tile, BLOCK_M=block_m, BLOCK_R=block_r, BLOCK_P=block_p,
            HAS_ROPE=rope_size > 0, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return out, lse


def _heads_of_program(gpu: GpuLimits | None, num_seqs: int, num_q_heads: int) -> int:
    """Each program reads the cache of its sequence once, so the fewer the better, as long as all processors have one.

    A program that takes 64 heads in place of 16 is half as fast alone, so that a few sequences are better shared out.
    """
    heads = LEAST_FOR_DOT
    if gpu is None or not gpu.is_hopper:
        return heads
    while heads < min(_MOST_HEADS, num_q_heads) and num_seqs * triton.cdiv(num_q_heads, heads) > gpu.processors:
        heads *= 2
    return heads
