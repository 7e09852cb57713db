"""The Triton kernels of vLLM and SGLang, where those are installed. Modules move there, so several places are tried."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from attnfuzz.bench.kernels.calls import Prepared, Unsupported
from attnfuzz.bench.kernels.providers.provider import Options, Provider, attention_of, merge_of, output_only
from attnfuzz.bench.kernels.tensors import AttentionTensors, MergeTensors

__all__ = ["SERVERS"]

_VLLM = ("vllm.v1.attention.ops", "vllm.attention.ops")
_SGLANG = ("sglang.srt.layers.attention.triton_ops",)
_SEGMENTS = 16
_SPLITS = 16


def _found(places: tuple[str, ...], module: str, function: str) -> Callable[..., Any]:
    """Raises ImportError if no place has it."""
    for place in places:
        try:
            found: Callable[..., Any] = vars(importlib.import_module(f"{place}.{module}"))[function]
        except (ImportError, KeyError):  # another version has it elsewhere
            continue
        return found
    raise ImportError(f"no {module}.{function} in {' or '.join(places)}; install a version that has it")


def _vllm_unified(tensors: AttentionTensors | MergeTensors, options: Options) -> Prepared:
    del options
    attention = attention_of(tensors)
    shape = attention.shape
    unified = _found(_VLLM, "triton_unified_attention", "unified_attention")
    out, lens = torch.empty_like(attention.q), attention.seq_lens.clone()
    rows = (len(shape.seq_lens), shape.num_q_heads, _SEGMENTS)
    workspaces = {
        "seq_threshold_3D": 128 // shape.num_kv_heads,
        "num_par_softmax_segments": _SEGMENTS,
        "softmax_segm_output": torch.empty(*rows, shape.head_size, dtype=torch.float32, device=out.device),
        "softmax_segm_max": torch.empty(rows, dtype=torch.float32, device=out.device),
        "softmax_segm_expsum": torch.empty(rows, dtype=torch.float32, device=out.device),
    }
    longest = max(shape.longest, shape.room)

    def call() -> torch.Tensor:
        unified(
            q=attention.q, k=attention.k_cache, v=attention.v_cache, out=out, cu_seqlens_q=attention.cu_seqlens_q,
            max_seqlen_q=max(shape.queries), seqused_k=lens, max_seqlen_k=longest, softmax_scale=shape.scale,
            causal=True, window_size=(-1, -1), block_table=attention.block_table, softcap=0,
            q_descale=None, k_descale=None, v_descale=None, **workspaces,
        )  # fmt: skip
        return out

    return Prepared(call, output_only, None if shape.kind == "mixed" else lens.copy_)


def _vllm_merge(tensors: AttentionTensors | MergeTensors, options: Options) -> Prepared:
    del options
    states = merge_of(tensors)
    merge = _found(_VLLM, "triton_merge_attn_states", "merge_attn_states")
    (prefix_lse, suffix_lse), out = states.lses("HT"), torch.empty_like(states.prefix_output)
    lse = torch.empty_like(prefix_lse)

    def call() -> None:
        merge(out, states.prefix_output, prefix_lse, states.suffix_output, suffix_lse, lse)

    return Prepared(call, lambda _: (out, lse.mT))


def _sglang_decode(tensors: AttentionTensors | MergeTensors, options: Options) -> Prepared:
    """Its block table names tokens, not pages: slots of the cache in the order of each sequence."""
    del options
    attention = attention_of(tensors)
    shape = attention.shape
    if shape.room:
        raise Unsupported("its table is as long as the tokens")
    decode = _found(_SGLANG, "decode_attention", "decode_attention_fwd")
    device, rows = attention.q.device, (len(shape.seq_lens), shape.num_q_heads, _SPLITS)
    offsets = torch.arange(shape.block_size, device=device)
    slots = (attention.block_table.long()[:, :, None] * shape.block_size + offsets).flatten(1)
    indices = torch.cat([row[:length] for row, length in zip(slots, shape.seq_lens, strict=True)])
    lens = torch.tensor([0, *shape.seq_lens], dtype=torch.int32, device=device)
    starts = lens.cumsum(0, dtype=torch.int32)
    k, v, out = attention.k_cache.flatten(0, 1), attention.v_cache.flatten(0, 1), torch.empty_like(attention.q)
    partial_out = torch.empty(*rows, shape.head_size, dtype=torch.float32, device=device)
    partial_lse = torch.empty(rows, dtype=torch.float32, device=device)
    splits = torch.full((len(shape.seq_lens),), _SPLITS, dtype=torch.int32, device=device)

    def call() -> torch.Tensor:
        decode(
            attention.q, k, v, out, starts, indices, partial_out, partial_lse, splits, _SPLITS, shape.scale, 1.0, 1.0
        )
        return out

    return Prepared(call, output_only)


def _sglang_merge(tensors: AttentionTensors | MergeTensors, options: Options) -> Prepared:
    del options
    states = merge_of(tensors)
    merge = _found(_SGLANG, "merge_state", "merge_state_triton")
    out, lse = torch.empty_like(states.prefix_output), torch.empty_like(states.prefix_lse)

    def call() -> None:
        merge(states.prefix_output, states.prefix_lse, states.suffix_output, states.suffix_lse, out, lse)

    return Prepared(call, lambda _: (out, lse))


SERVERS = (
    Provider("vllm_triton", "vLLM's unified attention", "vllm", ("decode", "mixed"), _vllm_unified, takes_pages=True),
    Provider("vllm_merge", "vLLM's merge in Triton", "vllm", ("merge",), _vllm_merge),
    Provider("sglang_triton", "SGLang's decode in Triton", "sglang", ("decode",), _sglang_decode, takes_pages=True),
    Provider("sglang_merge", "SGLang's merge in Triton", "sglang", ("merge",), _sglang_merge),
)
