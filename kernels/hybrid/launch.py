"""Checked wrapper of decode over divided, padded pages."""

from __future__ import annotations

import triton
from torch import Tensor

from attnfuzz.kernels.common.checks import check_power_of_two
from attnfuzz.kernels.common.device import on_device_of
from attnfuzz.kernels.hybrid.hybrid_decode import hybrid_decode_kernel


def hybrid_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float, out: Tensor,
    *, chunk: int = 0, tile: int = 32,
) -> None:  # fmt: skip
    """Attention of each sequence's last token to those of its chunk, into ``out``; 0 for an empty sequence.

    Shapes: ``q`` and ``out`` ``[num_seqs, num_q_heads, head_size]``; caches ``[pages, blocks, tokens, num_kv_heads,
    head_size]``, each with strides of its own; ``block_table [num_seqs, columns]`` names pages, int32; ``seq_lens``:
    int32. ``chunk``: tokens of a chunk, the first of which begins with the sequence; 0 for none. ``tile``: tokens per
    step. Last dimensions are contiguous. Raises ValueError.
    """
    check_power_of_two("tile", tile)
    last = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "out": out}
    for name, tensor in last.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: the last must be 1; call .contiguous() first")
    num_seqs, num_q_heads, head_size = q.shape
    _, blocks, block, num_kv_heads, _ = k_cache.shape
    with on_device_of(q):
        hybrid_decode_kernel[(num_seqs, num_q_heads)](
            q, q.stride(0), q.stride(1), k_cache, *k_cache.stride()[:4], v_cache, *v_cache.stride()[:4],
            block_table, block_table.stride(0), seq_lens, out, out.stride(0), out.stride(1), float(scale),
            num_q_heads // num_kv_heads, blocks * block, block, chunk, head_size,
            TILE=tile, BLOCK_D=triton.next_power_of_2(head_size),
        )  # fmt: skip
