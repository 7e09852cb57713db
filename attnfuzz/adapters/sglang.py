"""SGLang's attention kernels in Triton, and its merge in CUDA.

Without caches of 8 bits: for those they round weights, and when prefilling queries, to the format of the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families import SparseDecode
from attnfuzz.problems.supports import DTYPES

__all__ = [
    "decode_attention",
    "decode_attention_graph",
    "decode_attention_mla",
    "extend_attention",
    "extend_attention_mask",
    "extend_attention_tree",
    "extend_attention_unified",
    "merge_state",
    "merge_state_v2",
    "sparse_mla_decode",
]

SGLANG = attnfuzz.Engine("sglang", tried=("0.5.23",), settled=("0.5.23",))
SGL_KERNEL = attnfuzz.Engine("sglang-kernel", tried=(), written_for=("0.4.10",))
_OPS = ("sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops")
_CACHES: dict[str, Any] = {
    "dtypes": ("float16", "bfloat16"),
    "layouts": ("NHD", "interleaved"),
    "variants": ("window", "soft_cap", "sinks"),
    "graph_replay": False,  # each call makes tables of slots of its own, and SGLang keeps those that a graph reads
}


def _ops(name: str) -> tuple[str, ...]:
    return tuple(f"{place}.{name}" for place in _OPS)


def _slots(i: Any, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Its form of a block table, for the tokens of each sequence from ``starts`` to ``ends``.

    Where each sequence begins, and the slot of the cache of each of its tokens.
    """
    positions = torch.arange(i.block_table.shape[1] * i.block_size, device=i.q.device)
    slots = i.block_table.long().repeat_interleave(i.block_size, 1) * i.block_size + positions % i.block_size
    indptr = torch.nn.functional.pad((ends - starts).cumsum(0, dtype=torch.int32), (1, 0))
    return indptr, slots[(positions >= starts[:, None]) & (positions < ends[:, None])]


def _flat(cache: Tensor) -> Tensor:
    return cache.reshape(-1, *cache.shape[2:])


_DECODE: dict[str, Any] = {
    "needs": {"forward": _ops("decode_attention:decode_attention_fwd")},
    "options": {"max_kv_splits": (8, 16)},
}
_DECODES: dict[str, Any] = {**_CACHES, "lse": "none", "empty_sequences": False}


@SGLANG.kernel("paged_decode", supports=attnfuzz.Supports(**_DECODES), **_DECODE)
def decode_attention(i: Any, *, forward: Any, max_kv_splits: int) -> Callable[[], Tensor]:
    """Split-K decode. Its table names slots of the cache, not pages, of the keys that each query sees."""
    return _decode(i, forward, max_kv_splits, *_seen(i))


@SGLANG.kernel("paged_decode", supports=attnfuzz.Supports(**{**_DECODES, "graph_replay": True}), **_DECODE)
def decode_attention_graph(i: Any, *, forward: Any, max_kv_splits: int) -> Callable[[], Tensor]:
    """The same with the table in buffers that are kept for CUDA graphs, as SGLang's backend has them."""
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
    """The same on a cache of latent vectors: K and V are views of one buffer."""
    return _decode(i, forward, max_kv_splits, *_seen(i))


def _seen(i: Any) -> tuple[Tensor, Tensor]:
    first = torch.zeros_like(i.seq_lens) if i.window is None else (i.seq_lens - i.window).clamp(min=0)
    return _slots(i, first, i.seq_lens)


def _decode(i: Any, forward: Any, max_kv_splits: int, indptr: Tensor, slots: Tensor) -> Callable[[], Tensor]:
    num_seqs, num_q_heads, _ = i.q.shape
    partial_out = i.q.new_empty(num_seqs, num_q_heads, max_kv_splits, i.v_cache.shape[-1], dtype=torch.float32)
    partial_lse = i.q.new_empty(num_seqs, num_q_heads, max_kv_splits, dtype=torch.float32)
    splits = torch.full((num_seqs,), max_kv_splits, dtype=torch.int32, device=i.q.device)

    def call() -> Tensor:
        k, v = _flat(i.k_cache), _flat(i.v_cache)  # here, since a copy, where there are gaps, belongs to a graph
        forward(
            i.q, k, v, i.out, indptr, slots, partial_out, partial_lse, splits, max_kv_splits, i.scale, 1.0, 1.0,
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
def extend_attention(i: Any, *, forward: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """Prefill and decode on what is cached, and on the new tokens' keys and values, which lie apart in a row."""
    return _extend(i, forward, *_context(i))


_MASKED: dict[str, Any] = {**_CACHES, "variants": ("soft_cap", "sinks")}


@SGLANG.kernel("masked_attention", needs=_EXTEND, supports=attnfuzz.Supports(**_MASKED, masks=("causal", "tree")))
def extend_attention_tree(i: Any, *, forward: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """The same with the tree of speculative decoding in `custom_mask`, which is not read for what is cached."""
    return _under_mask(i, forward)


@SGLANG.kernel("masked_attention", needs=_EXTEND, supports=attnfuzz.Supports(**_MASKED))
def extend_attention_mask(i: Any, *, forward: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """The same with any mask in `custom_mask`, which is read for what is cached as well."""
    return _under_mask(i, forward, is_causal=False, skip_prefix_custom_mask=False)


def _under_mask(i: Any, forward: Any, **others: Any) -> Callable[[], tuple[Tensor, Tensor]]:
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
) -> Callable[[], tuple[Tensor, Tensor]]:
    k, v = _flat(i.k_cache), _flat(i.v_cache)
    indptr, slots = _slots(i, first, context)
    _, fresh = _slots(i, context, i.seq_lens)
    k_new, v_new = k[fresh], v[fresh]

    def call() -> tuple[Tensor, Tensor]:
        forward(
            i.q, k_new, v_new, i.out, k, v, i.cu_seqlens_q, indptr, slots, custom_mask, is_causal, mask_indptr,
            i.max_query_len, 1.0, 1.0, sm_scale=i.scale, logit_cap=i.soft_cap or 0.0, sliding_window_size=left,
            sinks=i.sinks, lse_extend=i.lse, **others,
        )  # fmt: skip
        return i.out, i.lse

    return call


@SGLANG.kernel(
    "paged_attention",
    needs={"forward": _ops("extend_attention:extend_attention_fwd_unified")},
    supports=attnfuzz.Supports(**_CACHES, lse="none", batch_invariant=True),
)
def extend_attention_unified(i: Any, *, forward: Any) -> Callable[[], Tensor]:
    """The same with all keys and values in the cache, as its deterministic mode runs it."""
    k, v = _flat(i.k_cache), _flat(i.v_cache)
    left, first, context = _context(i)
    indptr, slots = _slots(i, first, i.seq_lens)

    def call() -> Tensor:
        forward(
            i.q, i.out, k, v, 1.0, 1.0, i.cu_seqlens_q, indptr, slots, context - first, i.max_query_len,
            sm_scale=i.scale, logit_cap=i.soft_cap or 0.0, sliding_window_size=left, sinks=i.sinks,
            window_start_pos=first,
        )  # fmt: skip
        out: Tensor = i.out
        return out

    return call


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
    """The same in CUDA, as SGLang chooses it on NVIDIA's GPUs."""
    out, lse = merge(i.prefix_output, i.prefix_lse, i.suffix_output, i.suffix_lse, i.output, i.output_lse)
    return out, lse


_LATENTS = 512
"""Numbers of a latent row that are values; the others carry positions."""


@SGLANG.kernel(
    SparseDecode(
        head_size=attnfuzz.Choice((576,)),
        v_head_size=attnfuzz.Choice((_LATENTS,)),
        sentinel=attnfuzz.Choice(("-1",)),
        lse=attnfuzz.Choice((False,)),
        dtype=attnfuzz.Choice(("bfloat16",)),
    ),
    needs={"decode": ("sglang.kernels.ops.attention.dsa.triton_sparse_mla_decode:triton_sparse_mla_decode",)},
    supports=attnfuzz.Supports(),
    gpu_only=True,  # it counts the GPU's multiprocessors
)
def sparse_mla_decode(i: Any, *, decode: Any) -> Callable[[], Tensor]:
    """Sparse latent attention, `triton_sparse_mla_decode`, by lists of slots."""

    def call() -> Tensor:
        latents, positions = i.q[..., :_LATENTS], i.q[..., _LATENTS:]
        out: Tensor = decode(latents, positions, i.kv_cache, i.indices[:, None], i.head_size**-0.5)
        return out[0]

    return call
