"""FlashInfer: paged decode planned for a batch, paged prefill for mixed batches, and the merge of two states."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnfuzz.bench.kernels.calls import Prepared, Result, Unsupported
from attnfuzz.bench.kernels.providers.provider import Options, Provider, attention_of, merge_of, output_only
from attnfuzz.bench.kernels.tensors import AttentionTensors, MergeTensors

__all__ = ["FLASHINFER"]

_WORKSPACE_BYTES = 128 << 20


def _attention(tensors: AttentionTensors | MergeTensors, options: Options) -> Prepared:
    import flashinfer

    attention = attention_of(tensors)
    shape = attention.shape
    if shape.room:
        raise Unsupported("its plan holds the lengths")
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=attention.q.device)
    cache = (attention.k_cache, attention.v_cache)
    heads = (shape.num_q_heads, shape.num_kv_heads, shape.head_size, shape.block_size)
    types: dict[str, Any] = {"q_data_type": attention.q.dtype, "kv_data_type": attention.q.dtype}
    if shape.kind == "mixed":
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(attention.cu_seqlens_q, *_pages(attention), *heads, causal=True, sm_scale=shape.scale, **types)
    else:
        tensor_cores = bool(options["use_tensor_cores"])
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
        wrapper.plan(*_pages(attention), *heads, sm_scale=shape.scale, **types)
    out = torch.empty_like(attention.q)
    return Prepared(lambda: wrapper.run(attention.q, cache, out=out), output_only)


def _pages(attention: AttentionTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Its form of a block table: where each sequence's pages begin, all pages, and the tokens of each last page."""
    shape, device = attention.shape, attention.q.device
    counts = [-(-length // shape.block_size) for length in shape.seq_lens]
    starts = torch.tensor([0, *counts], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
    pages = torch.cat([row[:count] for row, count in zip(attention.block_table, counts, strict=True)])
    last = torch.tensor(
        [(length - 1) % shape.block_size + 1 for length in shape.seq_lens], dtype=torch.int32, device="cpu"
    )
    return starts.to(device), pages, last.to(device)


def _merge(tensors: AttentionTensors | MergeTensors, options: Options) -> Prepared:
    """Its LSEs are logarithms to base 2, tokens first."""
    del options
    import flashinfer

    states = merge_of(tensors)
    prefix_lse, suffix_lse = states.prefix_lse / math.log(2), states.suffix_lse / math.log(2)
    return Prepared(
        lambda: flashinfer.merge_state(states.prefix_output, prefix_lse, states.suffix_output, suffix_lse), _natural
    )


def _natural(returned: object) -> Result:
    if not isinstance(returned, tuple):
        raise TypeError(f"returned {type(returned).__name__}, where output and LSE were expected")
    return returned[0], returned[1] * math.log(2)


FLASHINFER = (
    Provider(
        "flashinfer",
        "FlashInfer's paged wrappers",
        "flashinfer-python",
        ("decode", "mixed"),
        _attention,
        takes_pages=True,
        options={"use_tensor_cores": (True, False)},
    ),
    Provider("flashinfer_merge", "flashinfer.merge_state", "flashinfer-python", ("merge",), _merge),
)
