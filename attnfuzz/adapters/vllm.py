"""vLLM's kernels: in Triton, FlashAttention 3 as it ships it for sm_90, its merge in CUDA, and two of its backends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.adapters.tokens import slots_of, whole_prompts
from attnfuzz.families import (
    CacheWrite,
    History,
    LatentVerify,
    MergeRanks,
    PackedDecode,
    RecurrentDecode,
    SparseDecode,
    TurboDecode,
    TurboWrite,
)
from attnfuzz.families.history import steps_of
from attnfuzz.families.turbo import row_parts
from attnfuzz.problems.quantised_kv import KvDtype
from attnfuzz.problems.variants import VariantName

VLLM = attnfuzz.Engine("vllm", tried=("0.33.0",), settled=("0.33.0",))
_OPS = ("vllm.v1.attention.ops", "vllm.attention.ops")


def _ops(name: str) -> tuple[str, ...]:
    return tuple(f"{place}.{name}" for place in _OPS)


_SEGMENTS = 16
"""Segments of `unified_attention` in vLLM's Triton backend (`NUM_PAR_SOFTMAX_SEGMENTS`)."""
_ALWAYS_IN_SEGMENTS = 1 << 20
"""Sequences up to which long ones are cut."""

_CACHES: dict[str, Any] = {"dtypes": ("float16", "bfloat16"), "layouts": ("NHD", "interleaved")}
_UNIFIED: dict[str, Any] = {
    **_CACHES,
    "lse": "none",
    "variants": ("window", "soft_cap", "alibi", "sinks"),
    "kv_dtypes": ("float8_e4m3fn", "float8_e5m2"),
    "kv_scales": ("tensor",),
    "graph_replay": True,
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
    numerics=attnfuzz.Numerics(scores="input"),
)
def decode_attention(i: Any, *, forward: Any, num_kv_splits: int) -> Callable[[], None]:
    """Split-K decode, `decode_attention_fwd`."""
    num_seqs, num_q_heads, head_size = i.q.shape
    partial = i.q.new_empty(num_seqs, num_q_heads, num_kv_splits, head_size + 1, dtype=torch.float32)
    return functools.partial(
        forward, i.q, i.k_cache, i.v_cache, i.out, i.lse, i.block_table, i.seq_lens, partial, num_kv_splits, i.scale,
        i.block_size,
    )  # fmt: skip


_RANKS = {32: 16, 48: 32, 80: 64, 192: 128, 288: 256, 576: 512}
"""Ranks of latent vectors by head size: powers of two, to which the kernel rounds. Its own are the last two."""


@VLLM.kernel(
    "latent_decode",
    needs={"forward": _ops("triton_decode_attention:decode_attention_fwd")},
    supports=attnfuzz.Supports(
        dtypes=("float16", "bfloat16"),
        gqa_ratios=(2, 5, 8, 16, 17, 24, 32, 64, 128),  # of one head the kernel is another one
        empty_sequences=False,
        where=tuple({"head_size": size, "v_head_size": rank} for size, rank in _RANKS.items()),
    ),
    options={"num_kv_splits": (4, 16)},
)
def decode_attention_mla(i: Any, *, forward: Any, num_kv_splits: int) -> Callable[[], None]:
    """`decode_attention` on a cache of latent vectors, as the backend TRITON_MLA calls it."""
    num_seqs, num_q_heads, _ = i.q.shape
    partial = i.q.new_empty(num_seqs, num_q_heads, num_kv_splits, i.v_head_size + 1, dtype=torch.float32)
    return functools.partial(
        forward, i.q, i.k_cache, i.v_cache, i.out, i.lse, i.block_table, i.seq_lens, partial, num_kv_splits, i.scale,
        i.block_size, is_mla=True,
    )  # fmt: skip


_FLASH_MLA = "vllm.third_party.flashmla.flash_mla_interface"


@VLLM.kernel(
    "latent_decode",
    needs={"attend": (f"{_FLASH_MLA}:flash_mla_with_kvcache",), "schedule": (f"{_FLASH_MLA}:get_mla_metadata",)},
    supports=attnfuzz.Supports(
        dtypes=("float16", "bfloat16"),
        head_sizes=(576,),
        v_head_sizes=(512,),
        block_sizes=(64,),
        empty_sequences=False,
    ),
    numerics=attnfuzz.Numerics(row_sum="float32", partials="float32"),
    gpu_only=True,
)
def flash_mla(i: Any, *, attend: Any, schedule: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """FlashMLA's dense decode for sm_90, which vLLM ships. Its schedule is made on the first call and kept."""
    kept, _ = schedule()

    def call() -> tuple[Tensor, Tensor]:
        out, lse = attend(
            i.q[:, None], i.kv_cache[:, :, None], i.block_table, i.seq_lens, i.v_head_size, kept,
            softmax_scale=i.scale, causal=True,
        )  # fmt: skip
        return out[:, 0], lse[:, :, 0]

    return call


@VLLM.kernel(
    "paged_attention",
    needs=_UNIFIED_NEEDS,
    supports=attnfuzz.Supports(**_UNIFIED),
    numerics=_UNIFIED_NUMERICS,
)
def unified_attention(i: Any, *, unified: Any, kv_modes: Any) -> Callable[[], None]:
    """Prefill, decode and both in one batch, without segments."""
    return _unified(i, unified, kv_modes, i.cu_seqlens_q, i.max_query_len, i.max_seq_len)


@VLLM.kernel(
    "paged_decode",
    needs=_UNIFIED_NEEDS,
    supports=attnfuzz.Supports(**_UNIFIED, empty_sequences=False),
    numerics=_UNIFIED_NUMERICS,
)
def unified_attention_segments(i: Any, *, unified: Any, kv_modes: Any) -> Callable[[], None]:
    """Decode with each sequence cut into segments."""
    starts = torch.arange(len(i.q) + 1, dtype=torch.int32, device=i.q.device)
    return _unified(i, unified, kv_modes, starts, 1, i.block_table.shape[1] * i.block_size, **_in_segments(i))


def _in_segments(i: Any) -> dict[str, Any]:
    """Arguments by which each sequence is cut into segments: how many, and buffers for their results."""
    rows = (len(i.q), i.q.shape[1], _SEGMENTS)
    return {
        "seq_threshold_3D": _ALWAYS_IN_SEGMENTS,
        "num_par_softmax_segments": _SEGMENTS,
        "softmax_segm_output": i.q.new_empty(*rows, 1 << (i.out.shape[-1] - 1).bit_length(), dtype=torch.float32),
        "softmax_segm_max": i.q.new_empty(rows, dtype=torch.float32),
        "softmax_segm_expsum": i.q.new_empty(rows, dtype=torch.float32),
    }


_UNIFIED_MASKED: dict[str, Any] = {**_UNIFIED, "variants": ("soft_cap", "sinks"), "graph_replay": False}


@VLLM.kernel(
    "masked_attention",
    needs=_UNIFIED_NEEDS,
    supports=attnfuzz.Supports(**_UNIFIED_MASKED, masks=("causal", "tree"), mask_per_sequence=False),
    numerics=_UNIFIED_NUMERICS,
)
def unified_attention_tree(i: Any, *, unified: Any, kv_modes: Any) -> Callable[[], None]:
    """The tree of speculative decoding in `qq_bias`: one table for all sequences, added to scores among new tokens."""
    query_lens = i.cu_seqlens_q.diff()
    seq, count = int(query_lens.argmax()), i.max_query_len
    table = i.mask[i.mask_indptr[seq] :][: int(query_lens[seq] * i.seq_lens[seq])].view(int(query_lens[seq]), -1)
    among = table[:, int(i.seq_lens[seq] - query_lens[seq]) :]
    bias = torch.zeros(count, count, dtype=torch.float32, device=i.q.device)
    bias[: len(among), : len(among)].masked_fill_(~among, -torch.inf)
    return _unified(i, unified, kv_modes, i.cu_seqlens_q, i.max_query_len, i.max_seq_len, qq_bias=bias)


@VLLM.kernel(
    "masked_attention",
    needs=_UNIFIED_NEEDS,
    supports=attnfuzz.Supports(**_UNIFIED_MASKED, masks=("full",)),
    numerics=_UNIFIED_NUMERICS,
)
def unified_attention_full(i: Any, *, unified: Any, kv_modes: Any) -> Callable[[], None]:
    """`unified_attention` with `causal=False`, as encoders and cross attention call it."""
    return _unified(i, unified, kv_modes, i.cu_seqlens_q, i.max_query_len, i.max_seq_len, causal=False)


def _unified(
    i: Any,
    unified: Any,
    kv_modes: Any,
    cu_seqlens_q: Tensor,
    longest_q: int,
    longest: int,
    *,
    causal: bool = True,
    **others: Any,
) -> Callable[[], None]:
    """``others``: arguments of the kernel for segments, or a bias."""
    window = getattr(i, "window", None)
    left = -1 if window is None else window - 1  # it does not count the query itself
    kv_mode = kv_modes.NONE if i.k_scale is None else kv_modes.FP8_PER_TENSOR
    return functools.partial(
        unified, q=i.q, k=i.k_cache, v=i.v_cache, out=i.out, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=longest_q,
        seqused_k=i.seq_lens, max_seqlen_k=longest, softmax_scale=i.scale, causal=causal, window_size=(left, 0),
        block_table=i.block_table, softcap=i.soft_cap or 0, q_descale=None, k_descale=i.k_scale,
        v_descale=i.v_scale, alibi_slopes=getattr(i, "alibi_slopes", None), sinks=i.sinks, kv_quant_mode=kv_mode,
        **others,
    )  # fmt: skip


@VLLM.kernel(History(block_size=attnfuzz.Choice((16,))), needs=_UNIFIED_NEEDS)
def unified_attention_history(i: Any, *, unified: Any, kv_modes: Any) -> None:
    """`unified_attention` for the batches of a scheduler over one cache, into which torch writes."""
    for step in steps_of(i):
        for cache, new in ((i.k_cache, step.k), (i.v_cache, step.v)):
            cache.flatten(0, 1)[step.slots] = new
        unified(
            q=step.q, k=i.k_cache, v=i.v_cache, out=step.out, cu_seqlens_q=step.starts,
            max_seqlen_q=int(step.starts.diff().max()), seqused_k=step.lens, max_seqlen_k=int(step.lens.max()),
            softmax_scale=i.head_size**-0.5, causal=True, window_size=(-1, 0), block_table=step.table, softcap=0,
            q_descale=None, k_descale=None, v_descale=None, kv_quant_mode=kv_modes.NONE,
        )  # fmt: skip


_QUANTISED: dict[str, Any] = {
    "head_size": attnfuzz.Choice((32, 64, 80, 128)),
    "cache_format": attnfuzz.Choice(("fp8", "int8", "int4_rotated")),
}


@VLLM.kernel(PackedDecode(**_QUANTISED), needs=_UNIFIED_NEEDS)
def unified_attention_quantised(i: Any, *, unified: Any, kv_modes: Any) -> Callable[[], None]:
    """Decode with scales for each token and head, without segments; of 4 bits it is `unified_attention_int4`."""
    return _quantised(i, unified, kv_modes)


@VLLM.kernel(
    PackedDecode(**_QUANTISED, lengths=attnfuzz.Integers(1, 300, likely=(1, 15, 16, 17, 256, 257), least=1, most=4)),
    needs=_UNIFIED_NEEDS,
)
def unified_attention_quantised_segments(i: Any, *, unified: Any, kv_modes: Any) -> Callable[[], None]:
    """`unified_attention_quantised` with each sequence cut into segments."""
    return _quantised(i, unified, kv_modes, **_in_segments(i))


def _quantised(i: Any, unified: Any, kv_modes: Any, **segments: Any) -> Callable[[], None]:
    modes = {"fp8": kv_modes.FP8_PER_TOKEN_HEAD, "int8": kv_modes.INT8_PER_TOKEN_HEAD}
    mode = modes.get(i.cache_format, kv_modes.INT4_PER_TOKEN_HEAD)
    starts = torch.arange(len(i.q) + 1, dtype=torch.int32, device=i.q.device)
    return functools.partial(
        unified, q=i.q, k=i.k_cache, v=i.v_cache, out=i.out, cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=i.seq_lens,
        max_seqlen_k=i.block_table.shape[1] * i.block_size, softmax_scale=i.head_size**-0.5, causal=True,
        window_size=(-1, 0), block_table=i.block_table, softcap=0, q_descale=None, k_descale=None, v_descale=None,
        kv_quant_mode=mode, k_scale_cache=i.k_scales[..., 0], v_scale_cache=i.v_scales[..., 0], **segments,
    )  # fmt: skip


_DIFFKV: dict[str, Any] = {
    "needs": {"attend": _ops("triton_unified_attention_diffkv:unified_attention_diffkv")},
    "numerics": _UNIFIED_NUMERICS,
}
_DIFFKV_CACHES: dict[str, Any] = {**_UNIFIED, "v_head_sizes": "any", "kv_dtypes": ("float8_e4m3fn",)}


@VLLM.kernel("paged_attention", supports=attnfuzz.Supports(**_DIFFKV_CACHES), **_DIFFKV)
def diffkv(i: Any, *, attend: Any) -> Callable[[], None]:
    """Heads of V that are smaller or larger than those of K, `unified_attention_diffkv`, without segments."""
    return _diffkv(i, attend)


@VLLM.kernel(
    "paged_attention",
    supports=attnfuzz.Supports(**{**_DIFFKV_CACHES, "graph_replay": False}, max_query_len=16),
    **_DIFFKV,
)
def diffkv_segments(i: Any, *, attend: Any) -> Callable[[], None]:
    """`diffkv` with the buffers of its backend: decode, and the few tokens that speculation verifies, in segments."""
    return _diffkv(i, attend, **_in_segments(i))


def _diffkv(i: Any, attend: Any, **segments: Any) -> Callable[[], None]:
    left = -1 if i.window is None else i.window - 1
    return functools.partial(
        attend, q=i.q, k=i.k_cache, v=i.v_cache, out=i.out, cu_seqlens_q=i.cu_seqlens_q, seqused_k=i.seq_lens,
        softmax_scale=i.scale, causal=True, window_size=(left, 0), block_table=i.block_table,
        softcap=i.soft_cap or 0, max_seqlen_q=i.max_query_len, alibi_slopes=i.alibi_slopes, sinks=i.sinks,
        k_descale=i.k_scale, v_descale=i.v_scale, **segments,
    )  # fmt: skip


_SEGMENTED: dict[str, Any] = {
    "needs": {"run": _ops("segmented_attention:run_segmented_attention")},
    "numerics": _UNIFIED_NUMERICS,
    "amd_only": True,
}
_SEGMENTED_CACHES: dict[str, Any] = {
    **_CACHES,
    "head_sizes": (64, 128, 256),
    "gqa_ratios": tuple(range(1, 17)),
    "lse": "none",
    "kv_dtypes": ("float8_e4m3fn",),
    "kv_scales": ("tensor",),
}
"""Caches that `can_use_segmented_attention` lets through."""


@VLLM.kernel(
    "paged_attention", supports=attnfuzz.Supports(**_SEGMENTED_CACHES, variants=("window", "sinks")), **_SEGMENTED
)
def segmented(i: Any, *, run: Any) -> Callable[[], None]:
    """`run_segmented_attention` of the backend ROCM_SEGMENTED_ATTN, with a workspace of each call's own."""
    return _segmented(i, run, causal=True)


@VLLM.kernel(
    "masked_attention",
    supports=attnfuzz.Supports(**_SEGMENTED_CACHES, variants=("sinks",), masks=("full",)),
    **_SEGMENTED,
)
def segmented_full(i: Any, *, run: Any) -> Callable[[], None]:
    """`segmented` with `causal=False`."""
    return _segmented(i, run, causal=False)


def _segmented(i: Any, run: Any, *, causal: bool) -> Callable[[], None]:
    window = getattr(i, "window", None)
    left = -1 if window is None else window - 1
    return functools.partial(
        run, i.q, i.out, i.k_cache, i.v_cache, i.block_table, i.cu_seqlens_q, i.seq_lens, i.max_query_len,
        i.max_seq_len, i.k_scale, i.v_scale, i.scale, sliding_window=left, causal=causal, sinks=i.sinks,
    )  # fmt: skip


_PACKED_CACHES: dict[str, Any] = {
    "dtypes": ("float16", "bfloat16"),
    "layouts": ("packed",),
    "lse": "none",
    "padding_tokens": False,
    "kv_dtypes": ("float8_e4m3fn",),
    "kv_scales": ("tensor",),
}
_CHUNKED_CACHES = {**_PACKED_CACHES, "block_sizes": (16, 24, 32, 48, 64, 128, 256)}
"""Of smaller pages `tl.dot` is not compiled."""
_CHUNKED: dict[str, Any] = {
    "needs": {"forward": _ops("chunked_prefill_paged_decode:chunked_prefill_paged_decode")},
    "numerics": _UNIFIED_NUMERICS,
}


@VLLM.kernel("paged_attention", supports=attnfuzz.Supports(**_CHUNKED_CACHES, variants=("window", "sinks")), **_CHUNKED)
def chunked_prefill(i: Any, *, forward: Any) -> Callable[[], None]:
    """`chunked_prefill_paged_decode` of the backend ROCM_ATTN, without its decode in HIP.

    Prompts by `prefix_prefill`, with new keys and values apart; sequences of one query token by a kernel of its own.
    """
    return _chunked(i, forward)


@VLLM.kernel("paged_attention", supports=attnfuzz.Supports(**_CHUNKED_CACHES, variants=("window", "alibi")), **_CHUNKED)
def chunked_prefill_alibi(i: Any, *, forward: Any) -> Callable[[], None]:
    """`chunked_prefill` with ALiBi, for which it has another kernel, and which it does not take beside sinks."""
    return _chunked(i, forward)


def _chunked(i: Any, forward: Any) -> Callable[[], None]:
    _, new = slots_of(i, i.seq_lens - i.cu_seqlens_q.diff(), i.seq_lens)
    k = i.k_cache.permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)[new]  # from [blocks, heads, size / x, block, x]
    v = i.v_cache.permute(0, 3, 1, 2).flatten(0, 1)[new]  # from [blocks, heads, size, block]
    if i.k_scale is not None:
        k, v = ((part.float() * scale).to(i.q.dtype) for part, scale in ((k, i.k_scale), (v, i.v_scale)))
    return functools.partial(
        forward, i.q, k, v, i.out, "auto" if i.k_scale is None else "fp8", i.k_cache, i.v_cache, i.block_table,
        i.cu_seqlens_q, i.seq_lens, i.max_seq_len, i.max_query_len, i.k_scale, i.v_scale, i.alibi_slopes,
        i.window, i.scale, sinks=i.sinks,
    )  # fmt: skip


@VLLM.kernel(
    "paged_attention",
    needs={"forward": _ops("prefix_prefill:context_attention_fwd")},
    supports=attnfuzz.Supports(**_PACKED_CACHES, variants=("window", "sinks")),
    numerics=_UNIFIED_NUMERICS,
)
def prefix_prefill(i: Any, *, forward: Any) -> Callable[[], None]:
    """`context_attention_fwd` that reads all keys and values from the cache, new ones too."""
    return functools.partial(
        forward, i.q, None, None, i.out, "auto" if i.k_scale is None else "fp8", i.k_cache, i.v_cache, i.block_table,
        i.cu_seqlens_q, i.seq_lens, i.max_seq_len, i.max_query_len, i.k_scale, i.v_scale,
        sliding_window=i.window, sm_scale=i.scale, sinks=i.sinks,
    )  # fmt: skip


@VLLM.kernel(
    "paged_attention",
    needs={"forward": _ops("triton_prefill_attention:context_attention_fwd")},
    supports=attnfuzz.Supports(
        **_CACHES, lse="none", variants=("window", "sinks"), padding_tokens=False, freed_pages=False, max_seq_len=300
    ),
)
def prefill_attention(i: Any, *, forward: Any) -> Callable[[], Tensor]:
    """Whole prompts without a cache, `context_attention_fwd`, of which the last query tokens are looked at."""
    q, k, v, starts, own = whole_prompts(i)
    out = i.out if q is i.q else torch.empty_like(q)
    left = -1 if i.window is None else i.window - 1

    def call() -> Tensor:
        forward(
            q, k, v, out, starts, i.seq_lens, i.max_seq_len, is_causal=True, softmax_scale=i.scale,
            sliding_window_q=left, sinks=i.sinks,
        )  # fmt: skip
        result: Tensor = out[own]
        return result

    return call


_BACKENDS = "vllm.v1.attention.backends"
_BACKEND_NEEDS = {
    "describe": ("vllm.v1.attention.backend:CommonAttentionMetadata",),
    "specify": ("vllm.v1.kv_cache_interface:FullAttentionSpec",),
    "graphs": ("vllm.config:CUDAGraphMode",),
}
_HEAD_SIZES = (16, 32, 64, 72, 80, 96, 112, 128, 192, 256)
_BLOCK_SIZES = (1, 8, 16, 32, 48, 64, 128, 256)
_VLLM_NAMES: dict[KvDtype, str] = {"float8_e4m3fn": "fp8_e4m3"}
_MAX_NUM_SEQS = 1024


def _stated(backend: Any, **others: Any) -> attnfuzz.Supports:
    """The contract that a backend states; float32, which its matrix units round to TF32, is left out."""
    return attnfuzz.Supports(
        **_stated_sizes(backend, **others),
        variants=("soft_cap", "alibi", *_stated_variants(backend)),
        kv_dtypes=tuple(ours for ours, its in _VLLM_NAMES.items() if backend.supports_kv_cache_dtype(its)),
        kv_scales=("tensor",),
        layouts=("NHD",),
        lse="none",
    )


def _stated_sizes(backend: Any, **others: Any) -> dict[str, Any]:
    del others
    dtypes = (str(dtype).removeprefix("torch.") for dtype in backend.supported_dtypes if dtype != torch.float32)
    return {
        "dtypes": tuple(dtypes),
        "head_sizes": tuple(size for size in _HEAD_SIZES if backend.supports_head_size(size)),
        "block_sizes": tuple(size for size in _BLOCK_SIZES if backend.supports_block_size(size)),
    }


def _stated_variants(backend: Any) -> tuple[VariantName, ...]:
    has: dict[VariantName, bool] = {"window": backend.supports_sliding_window(), "sinks": backend.supports_sink()}
    return tuple(name for name, stated in has.items() if stated)


def _backend(
    i: Any,
    backend: Any,
    describe: Any,
    specify: Any,
    graphs: Any,
    *,
    layer: Any,
    sinks: Tensor | None,
    **settings: Any,
) -> Callable[[], None]:
    """A backend's own call, with the metadata that its builder makes for a model of one attention ``layer``.

    Its cache has each token's key and value side by side: both are copied there before. ``settings``: parts of vLLM's
    configuration that this backend looks at beside those that all do.
    """
    num_q_heads, head_size = i.q.shape[1:]
    num_kv_heads, device = i.k_cache.shape[2], i.q.device
    cache_dtype = "auto" if i.k_scale is None else _VLLM_NAMES["float8_e4m3fn"]
    implementation = backend.get_impl_cls()(
        num_q_heads, head_size, i.scale, num_kv_heads, None, i.window, cache_dtype, i.soft_cap, sinks=sinks
    )
    implementation.alibi_slopes = i.alibi_slopes
    one = torch.ones(1, dtype=torch.float32, device=device)
    k_scale, v_scale = (one, one) if i.k_scale is None else (i.k_scale, i.v_scale)
    for name, value in {"impl": implementation, "_q_scale": one, "_k_scale": k_scale, "_v_scale": v_scale}.items():
        setattr(layer, name, value)
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: num_q_heads,
        get_num_kv_heads=lambda parallel: num_kv_heads,
        get_head_size=lambda: head_size,
        rswa_window=None,
        is_mm_prefix_lm=False,
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        compilation_config=SimpleNamespace(
            cudagraph_mode=graphs.NONE, max_cudagraph_capture_size=None, static_forward_context={_LAYER: layer}
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=_MAX_NUM_SEQS),
        **settings,
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
    cache = torch.cat((i.k_cache, i.v_cache), -1).transpose(1, 2)  # [num_blocks, num_kv_heads, block_size, 2 head_size]
    unused = i.q.new_empty(0)
    return functools.partial(implementation.forward, layer, i.q, unused, unused, cache, metadata, i.out)


_LAYER = "model.layers.0.self_attn.attn"


@VLLM.kernel(
    "paged_attention",
    needs={"backend": (f"{_BACKENDS}.triton_attn:TritonAttentionBackend",), **_BACKEND_NEEDS},
    supports=_stated,
    numerics=_UNIFIED_NUMERICS,
)
def triton_backend(i: Any, *, backend: Any, describe: Any, specify: Any, graphs: Any) -> Callable[[], None]:
    """The backend TRITON_ATTN with its metadata builder, which chooses between whole sequences and segments."""
    return _backend(i, backend, describe, specify, graphs, layer=SimpleNamespace(), sinks=i.sinks)


def _stated_by_flash_attention(backend: Any, **others: Any) -> attnfuzz.Supports:
    """The contract that the backend FLASH_ATTN states, without 8-bit caches, for which it rounds queries and
    weights."""
    return attnfuzz.Supports(
        **_stated_sizes(backend, **others),
        variants=("soft_cap", *_stated_variants(backend)),
        where=_MOST_HEADS_WITH_SINKS,
        layouts=("NHD",),
        lse="none",
    )


_MOST_HEADS_WITH_SINKS = ({"num_q_heads": tuple(range(1, 65))},)
"""Limits of FlashAttention 3: it raises an error for more heads."""
_FLASH_ATTENTION_3 = attnfuzz.Numerics(row_sum="float32", partials="float32", tanh="approximate")


@VLLM.kernel(
    "paged_attention",
    needs={
        "backend": (f"{_BACKENDS}.flash_attn:FlashAttentionBackend",),
        **_BACKEND_NEEDS,
        "layer_class": ("vllm.model_executor.layers.attention:Attention",),
    },
    supports=_stated_by_flash_attention,
    numerics=_FLASH_ATTENTION_3,
    gpu_only=True,
)
def flash_attn_backend(
    i: Any, *, backend: Any, describe: Any, specify: Any, graphs: Any, layer_class: Any
) -> Callable[[], None]:
    """The backend FLASH_ATTN with its metadata builder, which schedules FlashAttention 3 ahead."""
    return _backend(
        i, backend, describe, specify, graphs,
        layer=layer_class.__new__(layer_class),  # the builder reads windows from layers of this class and no other
        sinks=None if i.sinks is None else i.sinks.to(torch.bfloat16),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
    )  # fmt: skip


@VLLM.kernel(
    "merge_states",
    needs={"merge": _ops("triton_merge_attn_states:merge_attn_states")},
    supports=attnfuzz.Supports(dtypes=("float16", "bfloat16"), graph_replay=True),
)
def merge_attn_states(i: Any, *, merge: Any) -> tuple[Tensor, Tensor]:
    """The merge of a prefix's state with a suffix's, in Triton."""
    merge(i.output, i.prefix_output, i.prefix_lse, i.suffix_output, i.suffix_lse, i.output_lse)
    return i.output, i.output_lse


@VLLM.kernel(
    "merge_states",
    needs={
        "_library": ("vllm._C_stable_libtorch:__file__", "vllm._C:__file__"),
        "merge": ("torch:ops._C.merge_attn_states",),
    },
    supports=attnfuzz.Supports(
        where=(
            {"dtype": ("float16", "bfloat16"), "head_size": tuple(range(8, 513, 8))},
            {"dtype": "float32", "head_size": tuple(range(4, 513, 4))},
        ),
        graph_replay=True,
    ),
    gpu_only=True,
)
def merge_attn_states_cuda(i: Any, *, merge: Any, _library: str) -> tuple[Tensor, Tensor]:
    """`merge_attn_states` in CUDA, for head sizes of whole 16 bytes, as vLLM chooses it."""
    merge(i.output, i.output_lse, i.prefix_output, i.prefix_lse, i.suffix_output, i.suffix_lse, None, None)
    return i.output, i.output_lse


_FLASH_ATTENTION: dict[str, Any] = {
    "needs": {
        "forward": ("vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func",),
        "schedule": ("vllm.vllm_flash_attn.flash_attn_interface:get_scheduler_metadata",),
        "_library": ("vllm.vllm_flash_attn._vllm_fa3_C:__file__",),
    },
    "options": {"num_splits": (0, 1, 8), "scheduled": (False, True)},
    "numerics": _FLASH_ATTENTION_3,
    "gpu_only": True,
}
_FLASH_ATTENTION_CACHES: dict[str, Any] = {**_CACHES, "head_sizes": (64, 96, 128, 192, 256), "graph_replay": True}


@VLLM.kernel(
    "paged_attention",
    supports=attnfuzz.Supports(**_FLASH_ATTENTION_CACHES, variants=("window", "soft_cap")),
    **_FLASH_ATTENTION,
)
def flash_attention_3(i: Any, **others: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`flash_attn_varlen_func` on a paged cache, for Hopper GPUs; 0 splits: as many as it finds best."""
    return _flash_attention_3(i, i.cu_seqlens_q, i.max_query_len, i.max_seq_len, **others)


@VLLM.kernel(
    "paged_attention",
    supports=attnfuzz.Supports(
        **_FLASH_ATTENTION_CACHES, variants=("window", "soft_cap", "sinks"), where=_MOST_HEADS_WITH_SINKS
    ),
    **_FLASH_ATTENTION,
)
def flash_attention_3_sinks(i: Any, **others: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`flash_attention_3` with `s_aux`, in bfloat16, for up to 64 query heads."""
    return _flash_attention_3(i, i.cu_seqlens_q, i.max_query_len, i.max_seq_len, **others)


@VLLM.kernel(
    "paged_decode",
    supports=attnfuzz.Supports(**_FLASH_ATTENTION_CACHES, variants=("window", "soft_cap")),
    **_FLASH_ATTENTION,
)
def flash_attention_3_decode(i: Any, **others: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`flash_attention_3` for one query token of each sequence."""
    ends = torch.arange(len(i.q) + 1, dtype=torch.int32, device=i.q.device)
    return _flash_attention_3(i, ends, 1, i.block_table.shape[1] * i.block_size, **others)


@functools.cache
def _schedules(device: torch.device) -> Tensor:
    """Where schedules lie for good, as those of vLLM do: a graph reads them there. Four numbers a sequence, and one."""
    return torch.zeros(1 + 4 * _MAX_NUM_SEQS, dtype=torch.int32, device=device)


def _flash_attention_3(
    i: Any,
    cu_seqlens_q: Tensor,
    longest_q: int,
    longest: int,
    *,
    forward: Any,
    schedule: Any,
    _library: str,
    num_splits: int,
    scheduled: bool,
) -> Callable[[], tuple[Tensor, Tensor]]:
    window = (-1, -1) if i.window is None else (i.window - 1, 0)  # it does not count the query itself
    made = None
    if scheduled:
        num_q_heads, head_size = i.q.shape[1:]
        new = schedule(
            len(i.seq_lens), longest_q, longest, num_q_heads, i.k_cache.shape[2], head_size, i.seq_lens, i.q.dtype,
            cu_seqlens_q=cu_seqlens_q, page_size=i.block_size, causal=True, window_size=window,
            has_softcap=i.soft_cap is not None, num_splits=num_splits,
        )  # fmt: skip
        made = _schedules(i.q.device)[: len(new)]
        made.copy_(new)

    def call() -> tuple[Tensor, Tensor]:
        out, lse = forward(
            i.q, i.k_cache, i.v_cache, longest_q, cu_seqlens_q, longest, seqused_k=i.seq_lens, softmax_scale=i.scale,
            causal=True, window_size=list(window), softcap=i.soft_cap or 0.0, block_table=i.block_table,
            return_softmax_lse=True, out=i.out, scheduler_metadata=made, fa_version=3, num_splits=num_splits,
            s_aux=None if i.sinks is None else i.sinks.to(torch.bfloat16),
        )  # fmt: skip
        return out, lse.mT

    return call


_WRITES = _ops("triton_reshape_and_cache_flash:triton_reshape_and_cache_flash")
_QUANTISES = _ops("triton_reshape_and_cache_flash:triton_reshape_and_cache_flash_per_token_head_quant")


@VLLM.kernel(
    CacheWrite(layout=attnfuzz.Choice(("NHD",)), cache=attnfuzz.Choice(("same",))),
    needs={"write": _WRITES},
    gpu_only=True,  # it asks for the capability of the tensors' GPU
)
def reshape_and_cache(i: Any, *, write: Any) -> None:
    """New tokens into a paged cache, `triton_reshape_and_cache_flash`; of float8 it asks the platform first."""
    one = torch.ones(1, dtype=torch.float32, device=i.key.device)
    write(i.key, i.value, i.k_cache, i.v_cache, i.slot_mapping, "auto", one, one)


@VLLM.kernel(
    CacheWrite(layout=attnfuzz.Choice(("NHD",)), cache=attnfuzz.Choice(("fp8_token", "int8_token"))),
    needs={"quantise": _QUANTISES, "modes": ("vllm.v1.kv_cache_interface:KVQuantMode",)},
)
def reshape_and_cache_per_token_head(i: Any, *, quantise: Any, modes: Any) -> None:
    """A scale for each token and head, `triton_reshape_and_cache_flash_per_token_head_quant`."""
    mode = modes.INT8_PER_TOKEN_HEAD if i.cache == "int8_token" else modes.FP8_PER_TOKEN_HEAD
    quantise(i.key, i.value, i.k_cache, i.v_cache, i.k_scales, i.v_scales, i.slot_mapping, mode)


@VLLM.kernel(
    CacheWrite(
        layout=attnfuzz.Choice(("NHD",)),
        cache=attnfuzz.Choice(("int4_rotated",)),
        dtype=attnfuzz.Choice(("bfloat16",) if VLLM.on_gpu() else ("float16", "bfloat16")),
    ),
    needs={"quantise": _QUANTISES, "modes": ("vllm.v1.kv_cache_interface:KVQuantMode",)},
)
def reshape_and_cache_int4(i: Any, *, quantise: Any, modes: Any) -> None:
    """New tokens in 4 bits, `reshape_and_cache_int4`; zero points are taken out of the scales that it changes.

    On a GPU its rotation is in bfloat16, whatever the dtype (`_triton_hadamard_transform`).
    """
    both = ((i.k_scales, i.k_zeros), (i.v_scales, i.v_zeros))
    before = [scales.view(torch.int32) & -16 | zeros.int() & 15 for scales, zeros in both]
    after = [bits.clone() for bits in before]
    k_scales, v_scales = (bits.view(torch.float32) for bits in after)
    quantise(i.key, i.value, i.k_cache, i.v_cache, k_scales, v_scales, i.slot_mapping, modes.INT4_PER_TOKEN_HEAD)
    for (scales, zeros), old, new in zip(both, before, after, strict=True):
        is_new = old != new
        scales[is_new] = (new & -16).view(torch.float32)[is_new]
        zeros[is_new] = (new & 15).to(torch.uint8)[is_new]


@VLLM.kernel(TurboWrite(), needs={"store": _ops("triton_turboquant_store:triton_turboquant_store")})
def turboquant_store(i: Any, *, store: Any) -> None:
    """New tokens into rows of bytes that hold K and V, `triton_turboquant_store`."""
    store(
        i.key, i.value, i.cache_rows, i.slot_mapping, getattr(i, "turn", None), getattr(i, "midpoints", None),
        i.key_bits if i.key_bits < 8 else 0, sum(row_parts(i)[:2]), i.value_bits, key_fp8=i.key_bits == 8,
    )  # fmt: skip


@VLLM.kernel(
    TurboDecode(lengths=attnfuzz.Integers(1, 100, likely=(1, 4, 15, 16, 17, 31, 32, 33, 64, 65), least=1, most=4)),
    needs={"decode": _ops("triton_turboquant_decode:triton_turboquant_decode_attention")},
)
def turboquant_decode(i: Any, *, decode: Any) -> Callable[[], Tensor]:
    """Decode over such rows, `triton_turboquant_decode_attention`; vLLM has no empty sequences.

    In 32 splits, or 4 in the interpreter, where each program of a split takes as long as one that has tokens.
    """
    splits = 32 if VLLM.on_gpu() else 4
    return functools.partial(
        decode, i.q, i.cache_rows, i.block_table, i.seq_lens, None, getattr(i, "centroids", None), i.head_size**-0.5,
        i.key_bits if i.key_bits < 8 else 0, sum(row_parts(i)[:2]), i.value_bits, key_fp8=i.key_bits == 8,
        norm_correction=i.corrected, PiT=getattr(i, "turn", None), max_num_kv_splits=splits,
    )  # fmt: skip


@VLLM.kernel(
    SparseDecode(
        head_size=attnfuzz.Choice((576,)),
        v_head_size=attnfuzz.Choice((512,)),
        has_lengths=attnfuzz.Choice((False,)),
        cache=attnfuzz.Choice(("same",)),
        empty_lse=attnfuzz.Choice(("any",)),  # about -7e29; vLLM's callers take the output alone
        dtype=attnfuzz.Choice(("bfloat16",)),
    ),
    needs={"attend": _ops("xpu_mla_sparse:triton_bf16_mla_sparse_interface")},
)
def sparse_mla(i: Any, *, attend: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """Attention over the slots that the indexer chose, `triton_bf16_mla_sparse_interface`."""
    indices = i.indices[:, None]

    def call() -> tuple[Tensor, Tensor]:
        out, _, lse = attend(i.q, i.kv_cache, indices, i.head_size**-0.5)
        return out, lse

    return call


_ONE_TOKEN = attnfuzz.Integers(1, 1, least=1, most=4)
_FLA = "vllm.third_party.flash_linear_attention.ops"
_NO_BLOCK: dict[str, Any] = {"sentinel": attnfuzz.Choice((0,))}
"""Block 0 belongs to nobody (`NULL_BLOCK_ID`)."""


def _speculative(i: Any, update: Any, *gates: Any, **others: Any) -> Callable[[], Tensor]:
    def call() -> Tensor:
        out, _ = update(
            *gates, q=i.q[None], k=i.k[None], v=i.v[None], scale=i.head_size**-0.5, initial_state=i.state,
            cu_seqlens=i.cu_seqlens, ssm_state_indices=i.slots, num_accepted_tokens=i.accepted,
            use_qk_l2norm_in_kernel=i.normalised, **others,
        )  # fmt: skip
        return out[0]  # type: ignore[no-any-return]  # the engine's function has no types

    return call


@VLLM.kernel(
    RecurrentDecode(
        keeps=attnfuzz.Choice(("each",)),
        gates=attnfuzz.Choice(("given",)),
        per_channel=attnfuzz.Choice((False,)),
        **_NO_BLOCK,
    ),
    needs={"update": (f"{_FLA}.fused_recurrent:fused_recurrent_gated_delta_rule",)},
)
def gated_delta(i: Any, *, update: Any) -> Callable[[], Tensor]:
    """Speculative decoding of a recurrent layer, `fused_recurrent_gated_delta_rule`."""
    return _speculative(i, update, g=i.g[None], beta=i.beta[None])


@VLLM.kernel(
    RecurrentDecode(keeps=attnfuzz.Choice(("each",)), gates=attnfuzz.Choice(("raw",)), **_NO_BLOCK),
    needs={"update": (f"{_FLA}.fused_sigmoid_gating:fused_sigmoid_gating_delta_rule_update",)},
)
def gated_delta_sigmoid(i: Any, *, update: Any) -> Callable[[], Tensor]:
    """`gated_delta`, which works out the gates: `fused_sigmoid_gating_delta_rule_update`."""
    return _speculative(i, update, i.A_log, i.a[None], i.b[None], i.dt_bias, is_kda=i.per_channel)


@VLLM.kernel(
    RecurrentDecode(
        tokens=_ONE_TOKEN,
        keeps=attnfuzz.Choice(("last",)),
        gates=attnfuzz.Choice(("raw",)),
        per_channel=attnfuzz.Choice((False,)),
        **_NO_BLOCK,
    ),
    needs={"decode": (f"{_FLA}.fused_recurrent:fused_recurrent_gated_delta_rule_packed_decode",)},
)
def gated_delta_packed(i: Any, *, decode: Any) -> Callable[[], None]:
    """One token of each sequence, q, k and v side by side, `fused_recurrent_gated_delta_rule_packed_decode`."""

    def call() -> None:
        packed = torch.cat([part.flatten(1) for part in (i.q, i.k, i.v)], dim=1)
        decode(
            packed, i.a, i.b, i.A_log, i.dt_bias, i.head_size**-0.5, i.state, i.out[:, None], i.slots,
            use_qk_l2norm_in_kernel=i.normalised,
        )  # fmt: skip

    return call


_POWERS_OF_TWO: dict[str, Any] = {"head_size": attnfuzz.Choice((16, 64, 128, 512))}
"""The kernels take a block as large as a head."""


@VLLM.kernel(
    MergeRanks(num_ranks=attnfuzz.Choice((2, 4, 8)), parts=attnfuzz.Choice(("input",)), **_POWERS_OF_TWO),
    needs={
        "correct": _ops("dcp:correct_attn_out"),
        "mask": _ops("dcp:mask_dcp_empty_shards_"),
        "context": _ops("dcp:CPTritonContext"),
    },
)
def dcp_correct(i: Any, *, correct: Any, mask: Any, context: Any) -> tuple[Tensor, Tensor]:
    """Each rank corrects its output by all log-sum-exps, `correct_attn_out`; these outputs are added here."""
    lses = i.lses.clone()
    if i.empty == "unknown":
        for lse, lens in zip(lses, i.local_lens, strict=True):
            mask(lse, lens, i.query_start_loc)
    ranks = [correct(part.clone(), lses, rank, context(), i.base == "e") for rank, part in enumerate(i.outs)]
    return torch.stack([out for out, _ in ranks]).float().sum(0).to(i.out.dtype), ranks[-1][1]


@VLLM.kernel(
    MergeRanks(num_ranks=attnfuzz.Choice((2, 3, 4, 8)), parts=attnfuzz.Choice(("float32",)), **_POWERS_OF_TWO),
    needs={"pack": _ops("dcp:_dcp_a2a_pack_send"), "combine": _ops("dcp:_dcp_a2a_unpack_combine")},
)
def dcp_exchange(i: Any, *, pack: Any, combine: Any) -> tuple[Tensor, Tensor]:
    """All-to-all: each rank packs heads for the others, and merges those that it gets (`dcp_a2a_lse_reduce`)."""
    ranks, tokens, _, size = i.outs.shape
    sent = i.outs.new_empty(ranks, ranks, tokens, i.num_heads, size + 2)  # a float32 takes two numbers of 16 bits
    is_unknown = i.empty == "unknown"
    for rank in range(ranks):
        lens = (i.local_lens[rank], i.query_start_loc) if is_unknown else (None, None)
        pack(i.outs[rank], i.lses[rank], sent[rank], ranks, i.num_heads, size, 2, *lens)
    merged = [combine(sent[:, rank].contiguous(), size, 2, True, i.base == "e") for rank in range(ranks)]
    out, lse = (torch.cat(parts, dim=1) for parts in zip(*merged, strict=True))
    return out, lse


@VLLM.kernel(
    LatentVerify(
        num_heads=attnfuzz.Choice((2, 4, 6, 16, 20)),  # of one head the kernel is another one
        rank=attnfuzz.Choice((512,)),
        rope_size=attnfuzz.Choice((64,)),
        latents=attnfuzz.Choice(("same",)),
    ),
    needs={"forward": _ops("triton_decode_attention:decode_attention_fwd")},
    options={"num_kv_splits": (4, 16)},
)
def verify_mla(i: Any, *, forward: Any, num_kv_splits: int) -> Callable[[], None]:
    """Several query tokens, each a row of its own with its own length, as the backend TRITON_MLA flattens them."""
    counts = i.cu_seqlens_q.diff()
    table = i.block_table.repeat_interleave(counts, dim=0)
    lengths = i.seq_lens.repeat_interleave(counts)
    if i.causal:
        after = i.cu_seqlens_q[1:].repeat_interleave(counts) - torch.arange(len(i.q), device=i.q.device) - 1
        lengths = (lengths - after).int()
    partial = i.q.new_empty(len(i.q), i.num_heads, num_kv_splits, i.rank + 1, dtype=torch.float32)
    cache = i.kv_cache.view(-1, i.block_size, 1, i.kv_cache.shape[-1])
    return functools.partial(
        forward, i.q, cache, cache[..., : i.rank], i.out, i.lse, table, lengths, partial, num_kv_splits,
        i.q.shape[-1] ** -0.5, i.block_size, is_mla=True,
    )  # fmt: skip


_KIMI = "vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent"
_KDA: dict[str, Any] = {
    "values_per_key": attnfuzz.Choice((1,)),
    "gates": attnfuzz.Choice(("raw",)),
    "per_channel": attnfuzz.Choice((True,)),
    "normalised": attnfuzz.Choice((True,)),
    **_NO_BLOCK,
}


@VLLM.kernel(
    RecurrentDecode(keeps=attnfuzz.Choice(("each",)), **_KDA),
    needs={"update": (f"{_KIMI}:fused_recurrent_kda",)},
)
def kda(i: Any, *, update: Any) -> Callable[[], None]:
    """Speculative decoding of Kimi K3's recurrent layers, `fused_recurrent_kda`: q, k and v are parts of one row."""
    packed = torch.cat([part.flatten(1) for part in (i.q, i.k, i.v)], dim=1)[None]
    width = i.num_heads * i.head_size
    shape = (1, len(i.q), i.num_heads, -1)
    q, k, v = (part.view(shape) for part in packed.tensor_split((width, 2 * width), dim=2))

    def call() -> None:
        update(
            q, k, v, i.a[None], i.b[None], i.A_log, i.dt_bias, None, i.state, i.cu_seqlens, i.slots, i.accepted,
            i.out[None],
        )  # fmt: skip

    return call


@VLLM.kernel(
    RecurrentDecode(tokens=_ONE_TOKEN, keeps=attnfuzz.Choice(("last",)), **_KDA),
    needs={"decode": (f"{_KIMI}:fused_recurrent_kda_packed_decode",)},
)
def kda_packed(i: Any, *, decode: Any) -> Callable[[], None]:
    """One token of each sequence, `fused_recurrent_kda_packed_decode`."""
    packed = torch.cat([part.flatten(1) for part in (i.q, i.k, i.v)], dim=1)

    def call() -> None:
        decode(packed, i.a[None], i.b[None], i.A_log, i.dt_bias, None, i.state, i.slots, out=i.out[None])

    return call
