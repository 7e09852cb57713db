"""vLLM's attention kernels: in Triton, and FlashAttention 3 as it ships it for sm_90."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import attnfuzz

__all__ = [
    "decode_attention",
    "flash_attention_3",
    "merge_attn_states",
    "triton_backend",
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


_BACKEND = "vllm.v1.attention.backends.triton_attn:TritonAttentionBackend"
_HEAD_SIZES = (16, 32, 64, 72, 80, 96, 112, 128, 192, 256)
_BLOCK_SIZES = (1, 8, 16, 32, 48, 64, 128, 256)
_VLLM_NAMES = {"float8_e4m3fn": "fp8_e4m3"}
_MAX_NUM_SEQS = 1024


def _stated(backend: Any, **others: Any) -> attnfuzz.Supports:
    """What a backend says of itself; float32, which its matrix units round to TF32, is left out."""
    del others
    variants = {"window": backend.supports_sliding_window(), "sinks": backend.supports_sink()}
    dtypes = (str(dtype).removeprefix("torch.") for dtype in backend.supported_dtypes if dtype != torch.float32)
    stated: dict[str, Any] = {
        "dtypes": tuple(dtypes),
        "head_sizes": tuple(size for size in _HEAD_SIZES if backend.supports_head_size(size)),
        "block_sizes": tuple(size for size in _BLOCK_SIZES if backend.supports_block_size(size)),
        "variants": ("soft_cap", "alibi", *(name for name, has in variants.items() if has)),
        "kv_dtypes": tuple(ours for ours, its in _VLLM_NAMES.items() if backend.supports_kv_cache_dtype(its)),
    }
    return attnfuzz.Supports(**stated, layouts=("NHD",), kv_scales=("tensor",), lse="none")


@VLLM.kernel(
    "paged_attention",
    needs={
        "backend": (_BACKEND,),
        "describe": ("vllm.v1.attention.backend:CommonAttentionMetadata",),
        "specify": ("vllm.v1.kv_cache_interface:FullAttentionSpec",),
        "graphs": ("vllm.config:CUDAGraphMode",),
    },
    supports=_stated,
    numerics=_UNIFIED_NUMERICS,
)
def triton_backend(i: Any, *, backend: Any, describe: Any, specify: Any, graphs: Any) -> Callable[[], Tensor]:
    """The backend TRITON_ATTN with its metadata builder, which chooses between whole sequences and segments.

    Its cache has each token's key and value side by side: both are copied there before.
    """
    num_q_heads, head_size = i.q.shape[1:]
    num_kv_heads, device = i.k_cache.shape[2], i.q.device
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: num_q_heads,
        get_num_kv_heads=lambda parallel: num_kv_heads,
        get_head_size=lambda: head_size,
        rswa_window=None,
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=None,
        speculative_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=graphs.NONE, static_forward_context={}),
        scheduler_config=SimpleNamespace(max_num_seqs=_MAX_NUM_SEQS),
    )
    spec = specify(block_size=i.block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=i.k_cache.dtype)
    described = describe(
        query_start_loc=i.cu_seqlens_q,
        query_start_loc_cpu=i.cu_seqlens_q.cpu(),
        seq_lens=i.seq_lens,
        num_reqs=len(i.seq_lens),
        num_actual_tokens=len(i.q),
        max_query_len=i.max_query_len,
        max_seq_len=i.max_seq_len,
        block_table_tensor=i.block_table,
        slot_mapping=i.seq_lens.new_empty(0),
    )
    metadata = backend.get_builder_cls()(spec, [], config, device).build(0, described)
    cache_dtype = "auto" if i.k_scale is None else _VLLM_NAMES[str(i.k_cache.dtype).removeprefix("torch.")]
    implementation = backend.get_impl_cls()(
        num_q_heads, head_size, i.scale, num_kv_heads, None, i.window, cache_dtype, i.soft_cap, sinks=i.sinks
    )
    implementation.alibi_slopes = i.alibi_slopes
    one = torch.ones(1, dtype=torch.float32, device=device)
    k_scale, v_scale = (one, one) if i.k_scale is None else (i.k_scale, i.v_scale)
    layer = SimpleNamespace(_q_scale=one, _k_scale=k_scale, _v_scale=v_scale)
    cache = torch.cat((i.k_cache, i.v_cache), -1).transpose(1, 2)  # [num_blocks, num_kv_heads, block_size, 2 head_size]
    unused = i.q.new_empty(0)

    def call() -> Tensor:
        implementation.forward(layer, i.q, unused, unused, cache, metadata, i.out)
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
