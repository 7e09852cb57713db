"""Checked wrapper of decode by lists of blocks."""

from __future__ import annotations

import triton
from torch import Tensor

from attnfuzz.kernels.common.checks import check_power_of_two
from attnfuzz.kernels.common.device import on_device_of
from attnfuzz.kernels.common.matrix_units import LEAST_FOR_DOT
from attnfuzz.kernels.paged.block_sparse import block_sparse_kernel


def block_sparse(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, block_lists: Tensor,
    sparse_block: int, scale: float, out: Tensor, *, query_len: int = 1, tile: int = 16,
) -> None:  # fmt: skip
    """Attention of each row to the tokens of the blocks that it names, up to its own position, into ``out``.

    Shapes: ``q`` and ``out`` ``[num_seqs * query_len, num_q_heads, head_size]``, the last tokens of each sequence;
    caches ``[pages, tokens, num_kv_heads, head_size]``, each with strides of its own, of q's dtype; ``block_table
    [num_seqs, columns]``, ``seq_lens``, with the query tokens, and ``block_lists [num_kv_heads, rows, topk]``, of
    blocks of ``sparse_block`` tokens, all int32: what is below 0 names none. ``tile``: tokens per step, which divides
    ``sparse_block``. 0 for a row that sees none. Last dimensions are contiguous. Raises ValueError.
    """
    check_power_of_two("tile", tile)
    last = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_lists": block_lists, "out": out}
    for name, tensor in last.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: the last must be 1; call .contiguous() first")
    if sparse_block % tile != 0:
        raise ValueError(f"sparse_block={sparse_block} must be a multiple of tile={tile}; choose a smaller tile")
    rows, num_q_heads, head_size = q.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    group = num_q_heads // num_kv_heads
    with on_device_of(q):
        block_sparse_kernel[(rows, num_kv_heads)](
            q, q.stride(0), q.stride(1), k_cache, *k_cache.stride()[:3], v_cache, *v_cache.stride()[:3],
            block_table, block_table.stride(0), seq_lens, block_lists, *block_lists.stride()[:2],
            out, out.stride(0), out.stride(1), float(scale), query_len, page_size, block_lists.shape[2], group,
            head_size, SPARSE=sparse_block, TILE=tile, BLOCK_M=max(LEAST_FOR_DOT, triton.next_power_of_2(group)),
            BLOCK_D=triton.next_power_of_2(head_size),
        )  # fmt: skip
