"""Right kernels of `attnfuzz.families.BlockSparse`: the bundled one in Triton, and one in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

import attnfuzz
from attnfuzz.families.block_sparse import BlockSparse
from attnfuzz.kernels.paged import launch_blocks


@attnfuzz.kernel(BlockSparse())
def block_sparse(inputs: Any) -> None:
    """``launch_blocks.block_sparse``."""
    caches = inputs.k_cache, inputs.v_cache
    k_cache, v_cache = (cache.transpose(1, 2) if inputs.layout == "HND" else cache for cache in caches)
    launch_blocks.block_sparse(
        inputs.q, k_cache, v_cache, inputs.block_table, inputs.seq_lens, inputs.block_lists, inputs.sparse_block,
        inputs.head_size**-0.5, inputs.out, query_len=inputs.query_len,
    )  # fmt: skip


@attnfuzz.kernel(BlockSparse())
def block_sparse_eager(inputs: Any) -> None:
    """Row by row, and head by head."""
    group, size = inputs.gqa_ratio, inputs.block_size
    caches = inputs.k_cache, inputs.v_cache
    k_cache, v_cache = (cache.transpose(1, 2) if inputs.layout == "HND" else cache for cache in caches)
    of_block = torch.arange(inputs.sparse_block, device=inputs.q.device)
    inputs.out.zero_()
    for row, q in enumerate(inputs.q.float()):
        seq, token = divmod(row, inputs.query_len)
        limit = inputs.seq_lens[seq] - inputs.query_len + token + 1
        for head, blocks in enumerate(inputs.block_lists[:, row].long()):
            tokens = (blocks[blocks >= 0][:, None] * inputs.sparse_block + of_block).flatten()
            tokens = tokens[tokens < limit]
            pages = inputs.block_table[seq, tokens // size].long()
            k, v = (cache[pages, tokens % size, head].float() for cache in (k_cache, v_cache))
            heads = slice(head * group, (head + 1) * group)
            if len(tokens):
                scores = q[heads] @ k.mT * inputs.head_size**-0.5
                inputs.out[row, heads] = (scores.softmax(-1) @ v).to(inputs.out.dtype)
