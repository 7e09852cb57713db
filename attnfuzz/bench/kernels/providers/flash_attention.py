"""flash-attn: its KV-cache call on dense K and V for decode, its varlen call for mixed batches.

Its paged call takes pages of multiples of 256 tokens only (flash-attn 2) and is left out.
"""

from __future__ import annotations

import torch

from attnfuzz.bench.kernels.calls import Prepared, Result, Unsupported
from attnfuzz.bench.kernels.providers.provider import Options, Provider, attention_of, output_only
from attnfuzz.bench.kernels.tensors import AttentionTensors, MergeTensors

__all__ = ["FLASH_ATTENTION"]


def _flash(tensors: AttentionTensors | MergeTensors, options: Options) -> Prepared:
    del options
    attention = attention_of(tensors)
    if attention.shape.kind == "mixed":
        return _varlen(attention)
    from flash_attn import flash_attn_with_kvcache

    k, v = attention.dense
    q, lens, scale = attention.q[:, None], attention.seq_lens.clone(), attention.shape.scale
    return Prepared(
        lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, softmax_scale=scale, causal=True),
        _only_query,
        lens.copy_,
    )


def _only_query(returned: object) -> Result:
    out, _ = output_only(returned)
    return out[:, 0], None


def _varlen(attention: AttentionTensors) -> Prepared:
    if attention.shape.room:
        raise Unsupported("its lengths are known to the host")
    from flash_attn import flash_attn_varlen_func

    k, v = attention.packed
    lens = torch.tensor([0, *attention.shape.seq_lens], dtype=torch.int32, device=k.device)
    ends = lens.cumsum(0, dtype=torch.int32)
    longest_q, longest, scale = max(attention.shape.queries), attention.shape.longest, attention.shape.scale
    return Prepared(
        lambda: flash_attn_varlen_func(
            attention.q, k, v, attention.cu_seqlens_q, ends, longest_q, longest, softmax_scale=scale, causal=True
        ),
        output_only,
    )


FLASH_ATTENTION = (Provider("flash_attn", "flash-attn on dense K and V", "flash-attn", ("decode", "mixed"), _flash),)
