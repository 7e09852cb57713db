"""vLLM's attention kernels: in Triton, and FlashAttention 3 as it ships it for sm_90."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attnfuzz

__all__ = [
    "decode_attention",
    "flash_attention_3",
    "merge_attn_states",
    "unified_attention",
    "unified_attention_segments",
]

VLLM = attnfuzz.Engine("vllm", tried=("0.33.0",))
_OPS = ("vllm.v1.attention.ops", "vllm.attention.ops")


def _ops(name: str) -> tuple[str, ...]:
    return tuple(f"{place}.{name}" for place in _OPS)


_SEGMENTS = 16
"""Of `unified_attention`, as vLLM's Triton backend has them (`NUM_PAR_SOFTMAX_SEGMENTS`)."""
_ALWAYS_IN_SEGMENTS = 1 << 20
"""Sequences up to which long ones are cut."""

_CACHES: dict[str, Any] = {"dtypes": ("float16", "bfloat16"), "layouts": ("NHD", "interleaved")}
_UNIFIED: dict[str, Any] = {
    **_CACHES,
    "lse": "none",
    "variants": ("window", "soft_cap", "alibi", "sinks"),
    "kv_dtypes": ("float8_e4m3fn", "float8_e5m2"),
    "kv_scales": ("tensor",),
}
_UNIFIED_NEEDS = {
    "unified": _ops("triton_unified_attention:unified_attention"),
    "kv_modes": ("vllm.v1.kv_cache_interface:KVQuantMode",),
}
_UNIFIED_NUMERICS = attnfuzz.Numerics(dequantised="input")


@VLLM.kernel(
    "paged_decode",
    needs={"forward": _ops("triton_decode_attention:decode_attention_fwd")},
    supports=attnfuzz.Supports(**_CACHES, empty_sequences=False),
    options={"num_kv_splits": (4, 16)},
)
def decode_attention(i: Any, *, forward: Any, num_kv_splits: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Split-K decode, `decode_attention_fwd`."""
    num_seqs, num_q_heads, head_size = i.q.shape
    partial = i.q.new_empty(num_seqs, num_q_heads, num_kv_splits, head_size + 1, dtype=torch.float32)

    def call() -> tuple[Tensor, Tensor]:
        forward(
            i.q, i.k_cache, i.v_cache, i.out, i.lse, i.block_table, i.seq_lens, partial, num_kv_splits, i.scale,
            i.block_size,
        )  # fmt: skip
        return i.out, i.lse

    return call


@VLLM.kernel(
    "paged_attention",
    needs=_UNIFIED_NEEDS,
    supports=attnfuzz.Supports(**_UNIFIED),
    numerics=_UNIFIED_NUMERICS,
)
def unified_attention(i: Any, *, unified: Any, kv_modes: Any) -> Callable[[], Tensor]:
    """Prefill, decode and both in one batch, without segments."""
    return _unified(i, unified, kv_modes, i.cu_seqlens_q, i.max_query_len, i.max_seq_len)


@VLLM.kernel(
    "paged_decode",
    needs=_UNIFIED_NEEDS,
    supports=attnfuzz.Supports(**_UNIFIED, empty_sequences=False),
    numerics=_UNIFIED_NUMERICS,
)
def unified_attention_segments(i: Any, *, unified: Any, kv_modes: Any) -> Callable[[], Tensor]:
    """Decode with each sequence cut into segments."""
    num_seqs, num_q_heads, head_size = i.q.shape
    rows = (num_seqs, num_q_heads, _SEGMENTS)
    return _unified(
        i,
        unified,
        kv_modes,
        torch.arange(num_seqs + 1, dtype=torch.int32, device=i.q.device),
        1,
        i.block_table.shape[1] * i.block_size,
        seq_threshold_3D=_ALWAYS_IN_SEGMENTS,
        num_par_softmax_segments=_SEGMENTS,
        softmax_segm_output=i.q.new_empty(*rows, 1 << (head_size - 1).bit_length(), dtype=torch.float32),
        softmax_segm_max=i.q.new_empty(rows, dtype=torch.float32),
        softmax_segm_expsum=i.q.new_empty(rows, dtype=torch.float32),
    )


def _unified(
    i: Any, unified: Any, kv_modes: Any, cu_seqlens_q: Tensor, longest_q: int, longest: int, **segments: Any
) -> Callable[[], Tensor]:
    left = -1 if i.window is None else i.window - 1  # it does not count the query itself
    kv_mode = kv_modes.NONE if i.k_scale is None else kv_modes.FP8_PER_TENSOR

    def call() -> Tensor:
        unified(
            q=i.q, k=i.k_cache, v=i.v_cache, out=i.out, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=longest_q,
            seqused_k=i.seq_lens, max_seqlen_k=longest, softmax_scale=i.scale, causal=True, window_size=(left, 0),
            block_table=i.block_table, softcap=i.soft_cap or 0, q_descale=None, k_descale=i.k_scale,
            v_descale=i.v_scale, alibi_slopes=i.alibi_slopes, sinks=i.sinks, kv_quant_mode=kv_mode, **segments,
        )  # fmt: skip
        out: Tensor = i.out
        return out

    return call


@VLLM.kernel(
    "merge_states",
    needs={"merge": _ops("triton_merge_attn_states:merge_attn_states")},
    supports=attnfuzz.Supports(dtypes=("float16", "bfloat16")),
)
def merge_attn_states(i: Any, *, merge: Any) -> tuple[Tensor, Tensor]:
    """The merge of a prefix's state with a suffix's, in Triton."""
    merge(i.output, i.prefix_output, i.prefix_lse, i.suffix_output, i.suffix_lse, i.output_lse)
    return i.output, i.output_lse


@VLLM.kernel(
    "paged_attention",
    needs={
        "forward": ("vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func",),
        "_library": ("vllm.vllm_flash_attn._vllm_fa3_C:__file__",),
    },
    supports=attnfuzz.Supports(**_CACHES, head_sizes=(64, 96, 128, 192, 256)),
    options={"num_splits": (0, 1, 8)},
    gpu_only=True,
)
def flash_attention_3(i: Any, *, forward: Any, _library: str, num_splits: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """`flash_attn_varlen_func` on a paged cache, for Hopper GPUs; 0 splits: as many as it finds best."""

    def call() -> tuple[Tensor, Tensor]:
        out, lse = forward(
            i.q, i.k_cache, i.v_cache, i.max_query_len, i.cu_seqlens_q, i.max_seq_len, seqused_k=i.seq_lens,
            softmax_scale=i.scale, causal=True, block_table=i.block_table, return_softmax_lse=True, out=i.out,
            fa_version=3, num_splits=num_splits,
        )  # fmt: skip
        return out, lse.mT

    return call
