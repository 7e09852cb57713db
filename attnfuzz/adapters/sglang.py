"""SGLang's attention kernels in Triton, and its merge in CUDA.

Those of caches of 8 bits round weights and queries to the format of the cache, and are kernels of their own here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.adapters.tokens import flat, slots_of, whole_prompts, with_room
from attnfuzz.families import (
    BlockSparse,
    CacheWrite,
    History,
    IndexerTopk,
    LatentVerify,
    MergeRanks,
    RecurrentDecode,
    SparseDecode,
)
from attnfuzz.families.history import steps_of
from attnfuzz.families.indexer_topk import chosen_scores
from attnfuzz.problems.choices import HEAD_SIZES
from attnfuzz.problems.supports import DTYPES

SGLANG = attnfuzz.Engine("sglang", tried=("0.5.23",), settled=("0.5.23",))
SGL_KERNEL = attnfuzz.Engine("sglang-kernel", tried=(), written_for=("0.4.10",))
_OPS = ("sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops")
_CACHES: dict[str, Any] = {
    "dtypes": ("float16", "bfloat16"),
    "layouts": ("NHD", "interleaved"),
    "variants": ("window", "soft_cap", "sinks"),
    "graph_replay": False,  # each call makes tables of slots of its own, and SGLang keeps those that a graph reads
}
_FP8: dict[str, Any] = {
    "kv_dtypes": ("float8_e4m3fn",),
    "kv_scales": ("tensor",),
    "where": ({"kv_dtype": "float8_e4m3fn"},),
    "head_sizes": tuple(size for size in HEAD_SIZES if size > 16),  # a dot of 8 bits
}
_IN_FP8 = attnfuzz.Numerics(query="float8_e4m3fn", probabilities="float8_e4m3fn", row_sum="float32")
_IN_FP8_BESIDE_NEW = attnfuzz.Numerics(
    query="float8_e4m3fn", probabilities="float8_e4m3fn", row_sum="float32", dequantised="input"
)
"""The new tokens' keys and values are those of the cache times their scales, in the dtype of q."""


def _scales(i: Any) -> tuple[float, float]:
    """The scales of K and V as numbers of the host, which its backend takes of a layer."""
    if getattr(i, "k_scale", None) is None:  # nor have latent vectors any
        return 1.0, 1.0
    return float(i.k_scale), float(i.v_scale)


def _fresh(i: Any, slots: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of these slots as the tokens that are not cached yet have them."""
    parts = flat(i.k_cache), flat(i.v_cache)
    if i.k_scale is None:
        return parts[0][slots], parts[1][slots]
    read = (part.view(torch.uint8)[slots].view(part.dtype).float() for part in parts)  # no indexed load of float8
    k, v = ((part * scale).to(i.q.dtype) for part, scale in zip(read, _scales(i), strict=True))
    return k, v


def _ops(name: str) -> tuple[str, ...]:
    return tuple(f"{place}.{name}" for place in _OPS)


@SGLANG.kernel(
    CacheWrite(
        layout=attnfuzz.Choice(("NHD",)),
        cache=attnfuzz.Choice(("same", "fp8")),
        rotary=attnfuzz.Choice(("neox", "gptj")),
        rotated=attnfuzz.Choice(("whole",)),
        head_size=attnfuzz.Choice((16, 64, 128)),
        block_size=attnfuzz.Choice((1, 16)),
    ),
    needs={"write": _ops("fused_qk_rope_reshape_and_cache:fused_qk_rope_reshape_and_cache")},
)
def fused_rope_and_cache(i: Any, *, write: Any) -> None:
    """K is rotated and written with V, `fused_qk_rope_reshape_and_cache`, and K once more in place of q."""
    scales = (i.k_scale, i.v_scale) if i.cache == "fp8" else (None, None)
    write(
        i.key, i.key, i.value, i.k_cache, i.v_cache, i.slot_mapping, i.positions, i.cos_sin, *scales,
        i.rotary == "neox", True, output_zeros=False,
    )  # fmt: skip


_DECODE: dict[str, Any] = {
    "needs": {"forward": _ops("decode_attention:decode_attention_fwd")},
    "options": {"max_kv_splits": (8, 16)},
}
_DECODES: dict[str, Any] = {**_CACHES, "lse": "none", "empty_sequences": False}


@SGLANG.kernel("paged_decode", supports=attnfuzz.Supports(**_DECODES), **_DECODE)
def decode_attention(i: Any, *, forward: Any, max_kv_splits: int) -> Callable[[], Tensor]:
    """Split-K decode. Its table names slots of the cache, not pages, of the keys that each query sees."""
    return _decode(i, forward, max_kv_splits, *_seen(i))


@SGLANG.kernel("paged_decode", supports=attnfuzz.Supports(**_DECODES, **_FP8), numerics=_IN_FP8, **_DECODE)
def decode_attention_fp8(i: Any, *, forward: Any, max_kv_splits: int) -> Callable[[], Tensor]:
    """`decode_attention` on a cache of 8 bits, to which queries of groups and weights are rounded."""
    return _decode(i, forward, max_kv_splits, *_seen(i))


@SGLANG.kernel("paged_decode", supports=attnfuzz.Supports(**{**_DECODES, "graph_replay": True}), **_DECODE)
def decode_attention_graph(i: Any, *, forward: Any, max_kv_splits: int) -> Callable[[], Tensor]:
    """`decode_attention` with the table in buffers that are kept for CUDA graphs, as SGLang's backend has them."""
    indptr, slots = _seen(i)
    kept_indptr, kept_slots = _graph_buffers(i.q.device, len(indptr), i.block_table.numel() * i.block_size)
    kept_indptr.copy_(indptr)
    kept_slots[: len(slots)] = slots
    return _decode(i, forward, max_kv_splits, kept_indptr, kept_slots)


@functools.lru_cache(maxsize=16)
def _graph_buffers(device: torch.device, num_starts: int, num_slots: int) -> tuple[Tensor, Tensor]:
    starts = torch.zeros(num_starts, dtype=torch.int32, device=device)
    return starts, torch.zeros(num_slots, dtype=torch.int64, device=device)


@SGLANG.kernel(
    "latent_decode",
    supports=attnfuzz.Supports(
        dtypes=("float16", "bfloat16"),
        gqa_ratios=(1, 2, 5, 8, 16, 17, 24, 32, 64, 128),
        variants=("window", "soft_cap", "sinks"),
        lse="none",
        empty_sequences=False,
        graph_replay=False,
    ),
    **_DECODE,
)
def decode_attention_mla(i: Any, *, forward: Any, max_kv_splits: int) -> Callable[[], Tensor]:
    """`decode_attention` on a cache of latent vectors: K and V are views of one buffer."""
    return _decode(i, forward, max_kv_splits, *_seen(i))


def _seen(i: Any) -> tuple[Tensor, Tensor]:
    first = torch.zeros_like(i.seq_lens) if i.window is None else (i.seq_lens - i.window).clamp(min=0)
    return slots_of(i, first, i.seq_lens)


def _decode(i: Any, forward: Any, max_kv_splits: int, indptr: Tensor, slots: Tensor) -> Callable[[], Tensor]:
    num_seqs, num_q_heads, _ = i.q.shape
    partial_out = i.q.new_empty(num_seqs, num_q_heads, max_kv_splits, i.v_cache.shape[-1], dtype=torch.float32)
    partial_lse = i.q.new_empty(num_seqs, num_q_heads, max_kv_splits, dtype=torch.float32)
    splits = torch.full((num_seqs,), max_kv_splits, dtype=torch.int32, device=i.q.device)

    def call() -> Tensor:
        k, v = flat(i.k_cache), flat(i.v_cache)  # here, since a copy, where there are gaps, belongs to a graph
        forward(
            i.q, k, v, i.out, indptr, slots, partial_out, partial_lse, splits, max_kv_splits, i.scale, *_scales(i),
            logit_cap=i.soft_cap or 0.0, sinks=i.sinks,
        )  # fmt: skip
        out: Tensor = i.out
        return out

    return call


def _context(i: Any) -> tuple[int, Tensor, Tensor]:
    """The window without the query itself, -1 for none, and of each sequence the first cached token that is needed, and
    the first new one."""
    context = i.seq_lens - i.cu_seqlens_q.diff()
    if i.window is None:
        return -1, torch.zeros_like(context), context
    return i.window - 1, (context - (i.window - 1)).clamp(min=0), context


_EXTEND = {"forward": _ops("extend_attention:extend_attention_fwd")}


@SGLANG.kernel("paged_attention", needs=_EXTEND, supports=attnfuzz.Supports(**_CACHES))
def extend_attention(i: Any, *, forward: Any) -> Callable[[], None]:
    """Prefill and decode on what is cached, and on the new tokens' keys and values, which lie apart in a row."""
    return _extend(i, forward, *_context(i))


@SGLANG.kernel(
    "paged_attention", needs=_EXTEND, supports=attnfuzz.Supports(**_CACHES, **_FP8), numerics=_IN_FP8_BESIDE_NEW
)
def extend_attention_fp8(i: Any, *, forward: Any) -> Callable[[], None]:
    """`extend_attention` on a cache of 8 bits, to which queries and weights are rounded for what is cached."""
    return _extend(i, forward, *_context(i))


_MASKED: dict[str, Any] = {**_CACHES, "variants": ("soft_cap", "sinks")}


@SGLANG.kernel("masked_attention", needs=_EXTEND, supports=attnfuzz.Supports(**_MASKED, masks=("causal", "tree")))
def extend_attention_tree(i: Any, *, forward: Any) -> Callable[[], None]:
    """`extend_attention` with the tree of speculative decoding in `custom_mask`, not read for what is cached."""
    return _under_mask(i, forward)


@SGLANG.kernel("masked_attention", needs=_EXTEND, supports=attnfuzz.Supports(**_MASKED))
def extend_attention_mask(i: Any, *, forward: Any) -> Callable[[], None]:
    """`extend_attention` with any mask in `custom_mask`, which is read for what is cached as well."""
    return _under_mask(i, forward, is_causal=False, skip_prefix_custom_mask=False)


def _under_mask(i: Any, forward: Any, **others: Any) -> Callable[[], None]:
    context = i.seq_lens - i.cu_seqlens_q.diff()
    mask = {"custom_mask": i.mask, "mask_indptr": i.mask_indptr}
    return _extend(i, forward, -1, torch.zeros_like(context), context, **mask, **others)


def _extend(
    i: Any,
    forward: Any,
    left: int,
    first: Tensor,
    context: Tensor,
    *,
    custom_mask: Tensor | None = None,
    is_causal: bool = True,
    mask_indptr: Tensor | None = None,
    **others: Any,
) -> Callable[[], None]:
    k, v = flat(i.k_cache), flat(i.v_cache)
    indptr, slots = slots_of(i, first, context)
    k_new, v_new = _fresh(i, slots_of(i, context, i.seq_lens)[1])
    return functools.partial(
        forward, i.q, k_new, v_new, i.out, k, v, i.cu_seqlens_q, indptr, slots, custom_mask, is_causal, mask_indptr,
        i.max_query_len, *_scales(i), sm_scale=i.scale, logit_cap=i.soft_cap or 0.0, sliding_window_size=left,
        sinks=i.sinks, lse_extend=i.lse, **others,
    )  # fmt: skip


_UNIFIED: dict[str, Any] = {**_CACHES, "lse": "none", "batch_invariant": True}
_UNIFIED_NEEDS = {"forward": _ops("extend_attention:extend_attention_fwd_unified")}


@SGLANG.kernel("paged_attention", needs=_UNIFIED_NEEDS, supports=attnfuzz.Supports(**_UNIFIED))
def extend_attention_unified(i: Any, *, forward: Any) -> Callable[[], None]:
    """`extend_attention` with all keys and values in the cache, as its deterministic mode runs it."""
    return _unified(i, forward)


@SGLANG.kernel(
    "paged_attention", needs=_UNIFIED_NEEDS, supports=attnfuzz.Supports(**_UNIFIED, **_FP8), numerics=_IN_FP8
)
def extend_attention_unified_fp8(i: Any, *, forward: Any) -> Callable[[], None]:
    """`extend_attention_unified` on a cache of 8 bits, to which queries and weights are rounded."""
    return _unified(i, forward)


def _unified(i: Any, forward: Any) -> Callable[[], None]:
    k, v = flat(i.k_cache), flat(i.v_cache)
    left, first, context = _context(i)
    indptr, slots = slots_of(i, first, i.seq_lens)
    return functools.partial(
        forward, i.q, i.out, k, v, *_scales(i), i.cu_seqlens_q, indptr, slots, context - first, i.max_query_len,
        sm_scale=i.scale, logit_cap=i.soft_cap or 0.0, sliding_window_size=left, sinks=i.sinks,
        window_start_pos=first,
    )  # fmt: skip


@SGLANG.kernel(
    "merge_states",
    needs={"merge": _ops("merge_state:merge_state_triton")},
    supports=attnfuzz.Supports(dtypes=("float16", "bfloat16"), lse_layout="TH", graph_replay=True),
)
def merge_state(i: Any, *, merge: Any) -> tuple[Tensor, Tensor]:
    """The merge of two states."""
    out, lse = merge(i.prefix_output, i.prefix_lse, i.suffix_output, i.suffix_lse, i.output, i.output_lse)
    return out, lse


def _merged_by_cuda(takes: Any, **others: Any) -> attnfuzz.Supports:
    """SGLang says which head sizes it leaves to Triton, by a tensor's dtype."""
    del others
    sizes = {
        dtype: tuple(
            size for size in range(1, 513) if takes(torch.empty(0, 0, size, dtype=getattr(torch, dtype), device="cpu"))
        )
        for dtype in DTYPES
    }
    where = tuple({"dtype": dtype, "head_size": found} for dtype, found in sizes.items())
    return attnfuzz.Supports(where=where, lse_layout="TH", graph_replay=True)


@SGL_KERNEL.kernel(
    "merge_states",
    needs={
        "merge": ("sgl_kernel:merge_state_v2",),
        "takes": ("sglang.srt.layers.attention.merge_state:_supported_headdim",),
    },
    supports=_merged_by_cuda,
    gpu_only=True,
)
def merge_state_v2(i: Any, *, merge: Any, takes: Any) -> tuple[Tensor, Tensor]:
    """`merge_state` in CUDA, as SGLang chooses it on NVIDIA's GPUs."""
    out, lse = merge(i.prefix_output, i.prefix_lse, i.suffix_output, i.suffix_lse, i.output, i.output_lse)
    return out, lse


_LATENTS = 512
"""Numbers of a latent row that are values; the others carry positions."""


@SGLANG.kernel(
    SparseDecode(
        head_size=attnfuzz.Choice((576,)),
        v_head_size=attnfuzz.Choice((_LATENTS,)),
        sentinel=attnfuzz.Choice(("-1",)),
        has_lengths=attnfuzz.Choice((False,)),
        cache=attnfuzz.Choice(("same",)),
        lse=attnfuzz.Choice((False,)),
        dtype=attnfuzz.Choice(("bfloat16",)),
    ),
    needs={"decode": ("sglang.kernels.ops.attention.dsa.triton_sparse_mla_decode:triton_sparse_mla_decode",)},
    gpu_only=True,  # it counts the GPU's multiprocessors
)
def sparse_mla_decode(i: Any, *, decode: Any) -> Callable[[], Tensor]:
    """Sparse latent attention, `triton_sparse_mla_decode`, by lists of slots."""

    def call() -> Tensor:
        latents, positions = i.q[..., :_LATENTS], i.q[..., _LATENTS:]
        out: Tensor = decode(latents, positions, i.kv_cache, i.indices[:, None], i.head_size**-0.5)
        return out[0]

    return call


_DSA = "sglang.kernels.ops.attention.dsa"
_DSA_ROWS: dict[str, Any] = {
    "head_size": attnfuzz.Choice((576,)),
    "v_head_size": attnfuzz.Choice((_LATENTS,)),
    "sentinel": attnfuzz.Choice(("-1",)),
    "lse": attnfuzz.Choice((False,)),
    "dtype": attnfuzz.Choice(("bfloat16",)),
}
_DSA_NEEDS = {
    "prefill": (f"{_DSA}.triton_sparse_mla_prefill:sparse_mla_prefill",),
    "dequantise": (f"{_DSA}.dequant_k_cache:dequantize_k_cache",),
}
_TILE = (64, 8, 2)
"""Indices at a time, warps and stages, as it has them on a GPU of compute capability 9.0."""


def _dequantised(i: Any, dequantise: Any) -> Tensor:
    """The cache in bfloat16, as a server dequantises it before it prefills."""
    cache: Tensor = i.kv_cache if i.cache == "same" else dequantise(i.kv_cache.view(torch.float8_e4m3fn))
    return cache


@SGLANG.kernel(SparseDecode(**_DSA_ROWS), needs=_DSA_NEEDS)
def sparse_mla_prefill(i: Any, *, prefill: Any, dequantise: Any) -> Callable[[], Tensor]:
    """Sparse latent attention, `sparse_mla_prefill`; rows of 8 bits go through `dequantize_k_cache` first."""
    lengths = getattr(i, "topk_length", None)

    def call() -> Tensor:
        cache = _dequantised(i, dequantise)
        out: Tensor = prefill(i.q, cache, i.indices, i.head_size**-0.5, topk_length=lengths, config=_TILE)
        return out

    return call


@SGLANG.kernel(
    SparseDecode(
        named=attnfuzz.Integers(0, 64, likely=(0, 1, 2, 15, 16, 17, 31, 33, 64), least=4, most=4),
        num_heads=attnfuzz.Choice((8,)), has_lengths=attnfuzz.Choice((False,)), repeats=attnfuzz.Choice((False,)),
        **_DSA_ROWS,
    ),
    needs=_DSA_NEEDS,
    supports=attnfuzz.Supports(deterministic=False),  # rows are added up in the order of their slots
    options={"union": (2, 4)},
)  # fmt: skip
def sparse_mla_prefill_union(i: Any, *, prefill: Any, dequantise: Any, union: int) -> Callable[[], Tensor]:
    """`sparse_mla_prefill` for ``union`` tokens together, each of which has a bit in a mask; a slot is named once."""

    def call() -> Tensor:
        cache = _dequantised(i, dequantise)
        out: Tensor = prefill(
            i.q, cache, i.indices, i.head_size**-0.5, union=union, config=_TILE, union_config=(64, 8, 2)
        )
        return out

    return call


_MINIMAX = "sglang.kernels.ops.attention.minimax_sparse.decode"


@SGLANG.kernel(
    BlockSparse(
        # A list names the block of the row's own position, and sentinels stand behind what is named.
        lengths=attnfuzz.Integers(1, 150, likely=(1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128), least=1, most=4),
        query_len=attnfuzz.Choice((1,)),
        named=attnfuzz.Integer(1, 7, likely=(1, 7)),
        list_order=attnfuzz.Choice(("ascending",)),
        layout=attnfuzz.Choice(("NHD",)),
        cache_strides=attnfuzz.Choice(("contiguous",)),
    ),
    needs={"attend": (f"{_MINIMAX}.topk_sparse:flash_decode_with_gqa_share_sparse",)},
)
def block_sparse(i: Any, *, attend: Any) -> Callable[[], Tensor]:
    """MiniMax's decode by lists of blocks, `flash_decode_with_gqa_share_sparse`."""
    positions = torch.arange(i.block_table.shape[1] * i.block_size, device=i.q.device)
    slots = i.block_table.repeat_interleave(i.block_size, 1) * i.block_size + (positions % i.block_size).int()
    requests = torch.arange(len(i.seq_lens), device=i.q.device)
    k_cache, v_cache = (cache.view(-1, *cache.shape[2:]) for cache in (i.k_cache, i.v_cache))
    return functools.partial(
        attend, i.q, None, k_cache, v_cache, slots, i.seq_lens, requests, i.sparse_block, i.block_lists,
        sm_scale=i.head_size**-0.5, page_size=i.block_size,
    )  # fmt: skip


@SGLANG.kernel(
    IndexerTopk(
        topk=attnfuzz.Choice((16,)),
        # What has no score counts as -1e30 on the way, as NaN does.
        values=attnfuzz.Choice(("usual", "ties", "signed_zeros", "equal", "near", "negative")),
        nans=attnfuzz.Choice(("absent",)),
    ),
    needs={
        "select": (f"{_MINIMAX}.flash_with_topk_idx:_topk_index_partial_kernel",),
        "merge": (f"{_MINIMAX}.flash_with_topk_idx:_topk_index_merge_kernel",),
    },
    options={"chunks": (1, 4, 16)},
)
def indexer_topk(i: Any, *, select: Any, merge: Any, chunks: int) -> Callable[[], Tensor]:
    """The blocks that MiniMax's indexer chooses, by the kernels that `flash_decode_with_topk_idx` launches."""
    rows, width = i.scores.shape
    scores, kept = i.scores[None], 16
    partial = i.scores.new_empty(chunks, 1, rows, kept)
    places = torch.empty_like(partial, dtype=torch.int32)
    indices = torch.empty(1, rows, i.topk, dtype=torch.int32, device=scores.device)

    def call() -> Tensor:
        select[(rows, 1, chunks)](
            scores, partial, places, i.lengths_of_rows, 1, i.topk, -(-width // chunks), *scores.stride(),
            *partial.stride(), *places.stride(),
        )  # fmt: skip
        merge[(rows, 1)](
            partial, places, indices, i.lengths_of_rows, 1, i.topk, *partial.stride(), *places.stride(),
            *indices.stride(), NUM_TOPK_CHUNKS=chunks,
        )  # fmt: skip
        return chosen_scores(i, indices[0])

    return call


_FLA = "sglang.kernels.ops.attention.fla.fused_recurrent"
_BELOW_ZERO: dict[str, Any] = {"sentinel": attnfuzz.Choice((-1,))}
_KEPT = attnfuzz.Choice(("last", "aside", "tree"))


def _updated(i: Any, update: Any, *gates: Any, **others: Any) -> Callable[[], Tensor]:
    """As its backends call it to decode ("last"), and to verify what a draft model proposes."""
    if i.keeps != "last":
        others |= {
            "disable_state_update": True,
            "intermediate_states_buffer": i.steps,
            "intermediate_state_indices": i.steps_slots,
            "cache_steps": i.steps.shape[1],
            "retrieve_parent_token": getattr(i, "parents", None),
        }

    def call() -> Tensor:
        out: Tensor = update(
            *gates, q=i.q[None], k=i.k[None], v=i.v[None], scale=i.head_size**-0.5, initial_state_source=i.state,
            initial_state_indices=i.slots, cu_seqlens=i.cu_seqlens, use_qk_l2norm_in_kernel=i.normalised, **others,
        )  # fmt: skip
        return out[0]

    return call


@SGLANG.kernel(
    RecurrentDecode(
        keeps=_KEPT, gates=attnfuzz.Choice(("given",)), per_channel=attnfuzz.Choice((False,)), **_BELOW_ZERO
    ),
    needs={"update": (f"{_FLA}:fused_recurrent_gated_delta_rule_update",)},
)
def gated_delta(i: Any, *, update: Any) -> Callable[[], Tensor]:
    """Decode of a recurrent layer, `fused_recurrent_gated_delta_rule_update`."""
    return _updated(i, update, g=i.g[None], beta=i.beta[None])


@SGLANG.kernel(
    RecurrentDecode(keeps=_KEPT, gates=attnfuzz.Choice(("raw",)), **_BELOW_ZERO),
    needs={
        "update": (
            "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent:fused_sigmoid_gating_delta_rule_update",
        )
    },
)
def gated_delta_sigmoid(i: Any, *, update: Any) -> Callable[[], Tensor]:
    """`gated_delta`, which works out the gates: `fused_sigmoid_gating_delta_rule_update`."""
    a = i.a.flatten(1)  # [tokens, heads * channels]
    return _updated(
        i, update, A_log=i.A_log, a=a, dt_bias=i.dt_bias, softplus_beta=1.0, softplus_threshold=20.0, b=i.b[None],
        is_kda=i.per_channel,
    )  # fmt: skip


def _packed(i: Any, decode: Any) -> Callable[[], None]:
    def call() -> None:
        packed = torch.cat([part.flatten(1) for part in (i.q, i.k, i.v)], dim=1)
        decode(
            packed, i.a.flatten(1), i.b, i.A_log, i.dt_bias.flatten(), i.head_size**-0.5, i.state, i.out[:, None],
            i.slots, use_qk_l2norm_in_kernel=i.normalised,
        )  # fmt: skip

    return call


_PACKED: dict[str, Any] = {
    "tokens": attnfuzz.Integers(1, 1, least=1, most=4),
    "keeps": attnfuzz.Choice(("last",)),
    "gates": attnfuzz.Choice(("raw",)),
    **_BELOW_ZERO,
}


@SGLANG.kernel(
    RecurrentDecode(
        per_channel=attnfuzz.Choice((False,)),
        beta_dtype=attnfuzz.Choice(("input",)),
        **_PACKED,
    ),
    needs={"decode": (f"{_FLA}:fused_recurrent_gated_delta_rule_packed_decode",)},
)
def gated_delta_packed(i: Any, *, decode: Any) -> Callable[[], None]:
    """One token of each sequence, q, k and v side by side, `fused_recurrent_gated_delta_rule_packed_decode`."""
    return _packed(i, decode)


@SGLANG.kernel(
    RecurrentDecode(per_channel=attnfuzz.Choice((True,)), normalised=attnfuzz.Choice((False,)), **_PACKED),
    needs={"decode": (f"{_FLA}:fused_recurrent_kda_packed_decode",)},
)
def kda_packed(i: Any, *, decode: Any) -> Callable[[], None]:
    """`gated_delta_packed` with a gate for each channel, `fused_recurrent_kda_packed_decode`, where it calls no
    CUDA."""
    return _packed(i, decode)


_DCP = "sglang.kernels.ops.attention.dcp_kernels"
_RANKS: dict[str, Any] = {
    "head_size": attnfuzz.Choice((16, 64, 128, 512)),  # the kernels take a block as large as a head
    "empty": attnfuzz.Choice(("-inf", "+inf")),
    "parts": attnfuzz.Choice(("float32",)),
}


@SGLANG.kernel(
    MergeRanks(num_ranks=attnfuzz.Choice((2, 4, 8)), **_RANKS),
    needs={"correct": (f"{_DCP}:correct_attn_out",), "context": (f"{_DCP}:CPTritonContext",)},
)
def dcp_correct(i: Any, *, correct: Any, context: Any) -> tuple[Tensor, Tensor]:
    """Each rank corrects its output by all log-sum-exps, `correct_attn_out`; these outputs are added here."""
    ranks = []
    for rank, part in enumerate(i.outs):
        corrected = part.new_empty(part.transpose(0, 1).shape, dtype=torch.float32)
        ranks.append(correct(part, i.lses, rank, context(), corrected, is_lse_base_on_e=i.base == "e"))
    return torch.stack([out for out, _ in ranks]).sum(0).transpose(0, 1).to(i.out.dtype), ranks[-1][1]


_EXCHANGE: dict[str, Any] = {
    "needs": {"pack": (f"{_DCP}:dcp_pack_a2a_send",), "combine": (f"{_DCP}:dcp_lse_combine_triton",)},
    "supports": attnfuzz.Supports(),
}
_ANY_RANKS = attnfuzz.Choice((2, 3, 4, 8))


@SGLANG.kernel(MergeRanks(num_ranks=_ANY_RANKS, lse=attnfuzz.Choice((False,)), **_RANKS), **_EXCHANGE)
def dcp_exchange(i: Any, *, pack: Any, combine: Any) -> Tensor:
    """All-to-all: each rank packs heads for the others, and merges those that it gets (`dcp_a2a_lse_reduce`)."""
    return torch.cat([out for out, _ in _exchanged(i, pack, combine)], dim=1)


@SGLANG.kernel(MergeRanks(num_ranks=_ANY_RANKS, **_RANKS), **_EXCHANGE)
def dcp_exchange_lse(i: Any, *, pack: Any, combine: Any) -> tuple[Tensor, Tensor]:
    """`dcp_exchange` with the log-sum-exp."""
    out, lse = (torch.cat(parts, dim=1) for parts in zip(*_exchanged(i, pack, combine, return_lse=True), strict=True))
    return out, lse


def _exchanged(i: Any, pack: Any, combine: Any, **others: Any) -> list[tuple[Tensor, Tensor]]:
    """Outputs and log-sum-exps travel in one buffer, as its server has it."""
    ranks, tokens, _, size = i.outs.shape
    sent = i.outs.new_empty(ranks, ranks, tokens, i.num_heads, size + 2)
    words = sent.view(torch.float32)
    for rank in range(ranks):
        pack(i.outs[rank], i.lses[rank], sent[rank, ..., :size], words[rank, ..., size // 2])
    merged = []
    for rank in range(ranks):
        received = sent[:, rank].contiguous()
        lses = received.view(torch.float32)[..., size // 2]
        merged.append(combine(received[..., :size], lses, is_lse_base_on_e=i.base == "e", **others))
    return merged


@SGLANG.kernel(
    LatentVerify(
        contexts=attnfuzz.Integers(1, 160, likely=(1, 2, 15, 16, 17, 63, 64, 65, 128, 160), least=1, most=4),
        ragged=attnfuzz.Choice((False,)),
        latents=attnfuzz.Choice(("same",)),
        lse=attnfuzz.Choice((False,)),
    ),
    needs={"verify": ("sglang.kernels.ops.attention.verify_mla:verify_shared_kv_fwd",)},
)
def verify_mla(i: Any, *, verify: Any) -> Callable[[], None]:
    """Verifying draft tokens, `verify_shared_kv_fwd`: the context is in the cache, new tokens' rows lie apart."""
    positions = torch.arange(i.block_table.shape[1] * i.block_size, device=i.q.device)
    slots = i.block_table.long().repeat_interleave(i.block_size, 1) * i.block_size + positions % i.block_size
    context = (i.seq_lens - i.query_len)[:, None]
    new = i.kv_cache[slots[(positions >= context) & (positions < i.seq_lens[:, None])]]
    indptr = torch.nn.functional.pad(context[:, 0].cumsum(0, dtype=torch.int32), (1, 0))
    cached = slots[positions < context]

    def call() -> None:
        taken = verify(
            i.q, new, new[..., : i.rank], i.out, i.kv_cache, i.kv_cache[..., : i.rank], i.cu_seqlens_q, indptr, cached,
            None, i.causal, None, i.query_len, 1.0, 1.0, sm_scale=i.q.shape[-1] ** -0.5,
        )  # fmt: skip
        if not taken:
            raise ValueError("verify_shared_kv_fwd says that it does not handle this case")

    return call


@SGLANG.kernel(
    "paged_decode",
    needs={"merge": ("sglang.kernels.ops.attention.suffix_attention_merge:merge_suffix_attention_in_place",)},
    supports=attnfuzz.Supports(
        dtypes=("float16", "bfloat16"), layouts=("NHD", "interleaved"), lse="none", graph_replay=False
    ),
    options={"longest_suffix": (3, 16)},
)
def suffix_merge(i: Any, *, merge: Any, longest_suffix: int) -> Callable[[], Tensor]:
    """The last few tokens of a sequence, merged with the state of those before, `merge_suffix_attention_in_place`.

    That state is made by PyTorch here, in float32. A sequence may have nothing before its suffix, or no suffix.
    """
    suffix = i.seq_lens % (longest_suffix + 1)
    prefix = i.seq_lens - suffix
    k, v = flat(i.k_cache), flat(i.v_cache)
    places = torch.arange(longest_suffix, device=i.q.device)
    table = torch.zeros(len(suffix), longest_suffix, dtype=torch.int64, device=i.q.device)
    table[places < suffix[:, None]] = slots_of(i, prefix, i.seq_lens)[1]
    starts, slots = slots_of(i, torch.zeros_like(prefix), prefix)
    out, lse = torch.zeros_like(i.q), i.q.new_empty(i.q.shape[1], len(prefix), dtype=torch.float32)
    for n, (first, end) in enumerate(zip(starts.tolist(), starts[1:].tolist(), strict=False)):
        keys, values = (
            part[slots[first:end]].float().repeat_interleave(i.q.shape[1] // k.shape[1], dim=1) for part in (k, v)
        )
        scores = torch.einsum("hd,thd->ht", i.q[n].float(), keys) * i.scale
        lse[:, n] = scores.logsumexp(-1)
        if end > first:
            out[n] = torch.einsum("ht,thd->hd", scores.softmax(-1), values)

    def call() -> Tensor:
        merged: Tensor = merge(i.q, k, v, table, suffix, out.clone(), lse, i.scale)
        return merged

    return call


_EXACT: dict[str, Any] = {
    "dtypes": ("float16", "bfloat16"),
    "layouts": ("NHD", "interleaved"),
    "lse": "none",
    "padding_tokens": False,
    "graph_replay": False,
}


_VERIFY: dict[str, Any] = {**_EXACT, "max_query_len": 8, "empty_sequences": False}
_VERIFY_NEEDS = {"verify": (f"{_OPS[0]}.verify_splitkv:verify_splitkv_fwd",), **_EXTEND}


@SGLANG.kernel(
    "paged_attention",
    needs=_VERIFY_NEEDS,
    supports=attnfuzz.Supports(**_VERIFY, **_FP8),
    numerics=_IN_FP8_BESIDE_NEW,
)
def verify_splitkv_fp8(i: Any, *, verify: Any, forward: Any) -> Callable[[], Tensor]:
    """`verify_splitkv` on a cache of 8 bits, to which queries and weights are rounded for what is cached."""
    return _verified(i, verify, forward)


@SGLANG.kernel("paged_attention", needs=_VERIFY_NEEDS, supports=attnfuzz.Supports(**_VERIFY))
def verify_splitkv(i: Any, *, verify: Any, forward: Any) -> Callable[[], Tensor]:
    """Verifying a chain of draft tokens, `verify_splitkv_fwd`; its workspace is kept from call to call.

    It takes batches of as many draft tokens of each sequence. Sequences with fewer query tokens get queries of zeros
    before them. Where one is too short for that, or has nothing in the cache, `extend_attention_fwd` is called, as
    SGLang does for what `verify_splitkv_fwd` does not take.
    """
    return _verified(i, verify, forward)


def _verified(i: Any, verify: Any, forward: Any) -> Callable[[], Tensor]:
    counts, drafts = i.cu_seqlens_q.diff(), i.max_query_len
    is_taken = bool((i.seq_lens > drafts).all())
    news = torch.full_like(counts, drafts) if is_taken else counts
    indptr, cached = slots_of(i, torch.zeros_like(news), i.seq_lens - news)
    starts, fresh = slots_of(i, i.seq_lens - news, i.seq_lens)
    k, v = flat(i.k_cache), flat(i.v_cache)
    k_new, v_new = _fresh(i, fresh)
    q, own = with_room(i, starts)
    out = i.out if q is i.q else torch.empty_like(q)
    arguments = (q, k_new, v_new, out, k, v, starts, indptr, cached, None, True, None, drafts, *_scales(i))

    def call() -> Tensor:
        if not (is_taken and verify(*arguments, sm_scale=i.scale)):
            forward(*arguments, sm_scale=i.scale)
        result: Tensor = out[own]
        return result

    return call


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """In Triton's interpreter, `unified_attention_3d_mtp_func` asks for the number of processors all the same."""
    if SGLANG.on_gpu():
        yield
        return
    cuda: Any = torch.cuda
    before = cuda.get_device_properties
    cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=304)
    try:
        yield
    finally:
        cuda.get_device_properties = before


@SGLANG.kernel(
    "paged_attention",
    needs={"attend": (f"{_OPS[0]}.unified_attention_3d_mtp:unified_attention_3d_mtp_func",)},
    amd_only=True,
    supports=attnfuzz.Supports(
        dtypes=("bfloat16",),
        head_sizes=(256,),
        block_sizes=(16,),
        gqa_ratios=(16,),
        layouts=("NHD",),
        lse="none",
        max_query_len=4,
        kv_dtypes=("float8_e4m3fn",),
        kv_scales=("tensor",),
        where=({"kv_dtype": "float8_e4m3fn"},),
    ),
)
def unified_attention_3d_mtp(i: Any, *, attend: Any) -> Callable[[], Tensor]:
    """Verifying 2 to 4 tokens on AMD's GPUs, `unified_attention_3d_mtp_func`, whose launch options only these know."""
    longest = max(2, i.max_query_len)  # it is asserted, and not used otherwise

    def call() -> Tensor:
        with _as_on_a_gpu():
            attend(
                i.q, i.k_cache, i.v_cache, i.out, i.cu_seqlens_q, i.seq_lens, longest, i.max_seq_len, i.scale,
                i.block_table, i.k_scale, i.v_scale,
            )  # fmt: skip
        out: Tensor = i.out
        return out

    return call


@SGLANG.kernel(
    "paged_attention",
    needs={"forward": (f"{_OPS[0]}.prefill_attention:context_attention_fwd",)},
    supports=attnfuzz.Supports(**_EXACT, max_seq_len=300),
)
def prefill_attention(i: Any, *, forward: Any) -> Callable[[], Tensor]:
    """Whole prompts without a cache, `context_attention_fwd`, of which the last query tokens are looked at."""
    q, k, v, starts, own = whole_prompts(i)
    out = i.out if q is i.q else torch.empty_like(q)

    def call() -> Tensor:
        forward(q, k, v, out, starts, i.seq_lens, i.max_seq_len, sm_scale=i.scale)
        result: Tensor = out[own]
        return result

    return call


@SGLANG.kernel(
    "paged_attention",
    needs={"kernel": (f"{_OPS[0]}.mimo_local_attention:_mimo_local_attention_kernel",)},
    supports=attnfuzz.Supports(
        **{**_EXACT, "layouts": ("NHD",)}, head_sizes=(16,), gqa_ratios=(1,), max_seq_len=4, empty_sequences=False
    ),
)
def mimo_local_attention(i: Any, *, kernel: Any) -> Callable[[], Tensor]:
    """Groups of at most four audio tokens, launched as `mimo_local_attention` does, which asks for a GPU before.

    Groups of one length go into one launch, so there is one for each length.
    """
    q, k, v, starts, own = whole_prompts(i)
    out = i.out if q is i.q else torch.empty_like(q)
    heads, lengths = q.shape[1], i.seq_lens.tolist()
    groups = {
        length: torch.cat(
            [torch.arange(first, first + length, device=q.device)
             for first, one in zip(starts.tolist(), lengths, strict=False) if one == length]
        )
        for length in set(lengths)
    }  # fmt: skip

    def call() -> Tensor:
        for length, rows in groups.items():
            parts = [part[rows].view(-1, length, heads, 16).transpose(1, 2) for part in (q, k, v)]
            made = q.new_empty(len(rows), heads, 16)
            num = len(parts[0]) * heads
            strides = [stride for part in parts for stride in part.stride()[:3]]
            kernel[(-(-num // 4),)](*parts, made, num, heads, length, *strides, i.scale, True, num_warps=1)
            out[rows] = made
        result: Tensor = out[own]
        return result

    return call


_BACKEND = "sglang.srt.layers.attention.triton_backend"


@SGLANG.kernel(
    History(block_size=attnfuzz.Choice((16, 1)), head_size=attnfuzz.Choice((64, 16))),
    needs={
        "make": (f"{_BACKEND}:TritonAttnBackend",),
        "modes": ("sglang.srt.model_executor.forward_batch_info:ForwardMode",),
        "gather": _ops("kv_indices:create_flashinfer_kv_indices_triton"),
    },
    supports=attnfuzz.Supports(graph_replay=False),
    options={"in_graph": (False, True), "deterministic": (False, True)},
)
def triton_backend_history(i: Any, *, make: Any, modes: Any, gather: Any, in_graph: bool, deterministic: bool) -> None:
    """The backend `triton`, made once, with the metadata that it builds for each batch of a scheduler.

    Batches of one new token each are decoded (``in_graph``: with metadata in the buffers that graphs read, for a batch
    that is padded, as its graph runner fills them), drafts of equal numbers verified, all others extended.
    """
    pool = _Pool(i.k_cache, i.v_cache)
    with _server(_settings(deterministic)):
        backend = make(_runner(i, pool, gather))
        if in_graph:
            backend.init_cuda_graph_state(_MOST_REQUESTS, _MOST_REQUESTS)
        for step in steps_of(i):
            _serve(i, step, backend, modes, in_graph)


_MOST_REQUESTS, _CONTEXT = 4, 256
"""Requests that a graph has room for, and tokens of one."""


class _Pool:
    """A `MHATokenToKVPool` of one layer, whose slots lie in pages."""

    start_layer = 0

    def __init__(self, k_cache: Tensor, v_cache: Tensor) -> None:
        self.buffers = k_cache.flatten(0, 1), v_cache.flatten(0, 1)

    def get_key_buffer(self, layer: int) -> Tensor:
        return self.buffers[layer]

    def get_value_buffer(self, layer: int) -> Tensor:
        return self.buffers[layer + 1]

    def set_kv_buffer(self, layer: Any, at: Any, k: Tensor, v: Tensor, *scales: None) -> None:
        for buffer, new in zip(self.buffers, (k, v), strict=True):
            buffer[at.loc] = new.view(-1, *buffer.shape[1:])


class _Translator:
    """A `KVIndexTranslator` of a static pool: what it reads are the slots of the requests' rows."""

    def __init__(self, table: Tensor, gather: Any) -> None:
        self._table, self._gather = table, gather

    def pack_read_stream(
        self, plan: None, *, req_pool_indices: Tensor, seq_lens: Tensor, indptr: Tensor, out: Tensor
    ) -> bool:
        self._gather[(len(seq_lens),)](
            self._table, req_pool_indices, seq_lens, indptr, None, out, self._table.stride(0)
        )
        return False


def _runner(i: Any, pool: _Pool, gather: Any) -> Any:
    """The fields of a `ModelRunner` that the backend reads."""
    heads, kv_heads, size = i.num_kv_heads * i.gqa_ratio, i.num_kv_heads, i.head_size
    table = torch.zeros(_MOST_REQUESTS, _CONTEXT, dtype=torch.int32, device=i.k_cache.device)
    model = SimpleNamespace(
        attention_arch=None, get_max_num_attention_heads=lambda: heads, get_num_kv_heads=lambda tp, dcp: kv_heads,
        qk_nope_head_dim=0, qk_rope_head_dim=0, v_head_dim=size, swa_v_head_dim=size, kv_lora_rank=0, head_dim=size,
        context_len=_CONTEXT, is_encoder_decoder=False, hf_config=None,
    )  # fmt: skip
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(size=_MOST_REQUESTS, req_to_token=table), sliding_window_size=None,
        token_to_kv_pool=pool, token_to_kv_pool_allocator=None, page_size=i.block_size, model_config=model,
        kv_index_translator=_Translator(table, gather), decode_num_tokens_per_req=lambda: 4, is_draft_worker=False,
        kv_cache_dtype=i.k_cache.dtype, device=i.k_cache.device, gpu_id=0,
    )  # fmt: skip


def _settings(deterministic: bool) -> dict[str, Any]:
    kernel = SimpleNamespace(
        enable_lean_attention=None, triton_attention_num_kv_splits=8, triton_attention_split_tile_size=None
    )
    return {
        "get_exec": SimpleNamespace(
            kernel=kernel, dllm=SimpleNamespace(dllm_algorithm=None),
            deterministic=SimpleNamespace(enable_deterministic_inference=deterministic),
        ),
        "get_parallel": SimpleNamespace(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0),
        "get_schedule": SimpleNamespace(chunked_prefill_size=-1),
        "get_spec": SimpleNamespace(
            speculative_num_draft_tokens=4, speculative_num_steps=3, speculative_eagle_topk=1
        ),
    }  # fmt: skip


@contextmanager
def _server(settings: dict[str, Any]) -> Iterator[None]:
    """Set what a server would have set before it makes a backend."""
    names = vars(sys.modules[_BACKEND])
    before = {name: names[name] for name in settings}
    names |= {name: (lambda value=value: value) for name, value in settings.items()}
    try:
        yield
    finally:
        names |= before


def _serve(i: Any, step: Any, backend: Any, modes: Any, in_graph: bool) -> None:
    """One batch: its requests' rows, the metadata, the call of its only layer."""
    rows, counts, total = len(step.lens), step.starts.diff(), len(step.q)
    table = backend.req_to_token
    requests = torch.arange(rows, device=table.device).flip(0) + table.shape[0] - rows  # not in the order of the batch
    positions = torch.arange(step.table.shape[1] * i.block_size, device=table.device)
    slots = step.table.long().repeat_interleave(i.block_size, 1) * i.block_size + positions % i.block_size
    table[requests, : slots.shape[1]] = slots.int()
    before, lens = (step.lens - counts).long(), step.lens.long()
    one, same = bool((counts == 1).all()), bool((counts == counts[0]).all()) and bool((before > 0).all())
    mode = modes.DECODE if one else modes.TARGET_VERIFY if same else modes.EXTEND
    seen = before if mode == modes.TARGET_VERIFY else lens
    batch = SimpleNamespace(
        forward_mode=mode, batch_size=rows, req_pool_indices=requests, seq_lens=seen, seq_lens_sum=int(seen.sum()),
        out_cache_loc=step.slots, out_cache_loc_is_physical=False, extend_prefix_lens=before,
        extend_prefix_lens_cpu=before.tolist(), extend_seq_lens=counts, extend_seq_lens_cpu=counts.tolist(),
        extend_start_loc=step.starts[:-1], kv_loc_plan=None, encoder_lens=None, mha_one_shot=False,
        attn_attend_prefix_cache=False, positions=None,
        spec_info=SimpleNamespace(num_tokens_per_req=total // rows, custom_mask=None) if mode == modes.TARGET_VERIFY
        else None,
    )  # fmt: skip
    heads, kv_heads = step.q.shape[1], step.k.shape[1]
    layer = SimpleNamespace(
        tp_q_head_num=heads, tp_k_head_num=kv_heads, qk_head_dim=i.head_size, v_head_dim=i.head_size,
        scaling=i.head_size**-0.5, logit_cap=0.0, logit_capping_method="tanh", is_cross_attention=False,
        attn_type=None, sliding_window_size=-1, k_scale=None, v_scale=None, layer_id=0, xai_temperature_len=-1,
    )  # fmt: skip
    q, out = step.q.reshape(total, -1), step.out
    if mode != modes.DECODE:
        backend.init_forward_metadata(batch)
        out.copy_(backend.forward_extend(q, step.k, step.v, layer, batch).view_as(out))
        return
    if not in_graph:
        backend.init_forward_metadata(batch)
        out.copy_(backend.forward_decode(q, step.k, step.v, layer, batch).view_as(out))
        return
    batch.batch_size = table.shape[0]  # captured with requests of one token, then filled; what pads it stays so
    batch.req_pool_indices, batch.seq_lens = requests.new_zeros(table.shape[0]), lens.new_ones(table.shape[0])
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    room = q.new_zeros(table.shape[0], q.shape[1])
    call = functools.partial(backend.forward_decode, room, None, None, layer, batch, save_kv_cache=False)
    replay = _captured(call)
    batch.req_pool_indices[:rows], batch.seq_lens[:rows] = requests, lens
    backend.init_forward_metadata_out_graph(batch)
    room[:rows] = q
    backend.token_to_kv_pool.set_kv_buffer(layer, SimpleNamespace(loc=step.slots), step.k, step.v)
    out.copy_(replay()[:rows].view_as(out))


def _captured(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A graph of it, to be replayed; without a GPU the call itself."""
    if not SGLANG.on_gpu():
        return call
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
