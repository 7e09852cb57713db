"""Right kernels of `attnfuzz.families.HybridDecode`: the bundled one in Triton, and the same in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

import attnfuzz
from attnfuzz.families.hybrid_decode import HybridDecode
from attnfuzz.kernels.hybrid import launch


@attnfuzz.kernel(HybridDecode())
def hybrid_decode(inputs: Any) -> None:
    """``launch.hybrid_decode``."""
    launch.hybrid_decode(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_lens, inputs.head_size**-0.5,
        inputs.out, chunk=inputs.chunk,
    )  # fmt: skip


@attnfuzz.kernel(HybridDecode())
def hybrid_decode_eager(inputs: Any) -> None:
    """Sequence by sequence."""
    inputs.out.zero_()
    block = inputs.k_cache.shape[2]
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        first = (length - 1) // inputs.chunk * inputs.chunk if inputs.chunk and length else 0
        tokens = torch.arange(first, length, device=inputs.q.device)
        places = (
            inputs.block_table[seq, tokens // inputs.block_size].long(),
            tokens % inputs.block_size // block,
            tokens % inputs.block_size % block,
        )
        k, v = (
            cache[places].float().repeat_interleave(inputs.gqa_ratio, 1) for cache in (inputs.k_cache, inputs.v_cache)
        )
        scores = torch.einsum("hd,thd->ht", inputs.q[seq].float(), k) * inputs.head_size**-0.5
        inputs.out[seq] = torch.einsum("ht,thd->hd", scores.softmax(-1), v).to(inputs.out.dtype)
