"""SGLang's attention kernels in Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attnfuzz

__all__ = ["decode_attention", "merge_state"]

SGLANG = attnfuzz.Engine("sglang", tried=("0.5.23",))
_OPS = ("sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops")
_CACHES: dict[str, Any] = {"dtypes": ("float16", "bfloat16"), "layouts": ("NHD", "interleaved"), "lse": "none"}


def _ops(name: str) -> tuple[str, ...]:
    return tuple(f"{place}.{name}" for place in _OPS)


def _slots(i: Any, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Its form of a block table: where each sequence begins, and the slot of the cache of each of its tokens."""
    width = i.block_table.shape[1] * i.block_size
    positions = torch.arange(width, device=i.q.device)
    slots = i.block_table.long().repeat_interleave(i.block_size, 1) * i.block_size + positions % i.block_size
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return starts, slots[positions < lengths[:, None]]


def _flat(cache: Tensor) -> Tensor:
    return cache.reshape(-1, *cache.shape[2:])


@SGLANG.kernel(
    "paged_decode",
    needs={"forward": _ops("decode_attention:decode_attention_fwd")},
    supports=attnfuzz.Supports(**_CACHES, empty_sequences=False),
    options={"max_kv_splits": (8, 16)},
)
def decode_attention(i: Any, *, forward: Any, max_kv_splits: int) -> Callable[[], Tensor]:
    """Split-K decode. Its table names slots of the cache, not pages, in the order of each sequence."""
    num_seqs, num_q_heads, _ = i.q.shape
    k, v = _flat(i.k_cache), _flat(i.v_cache)
    starts, live = _slots(i, i.seq_lens)
    partial_out = i.q.new_empty(num_seqs, num_q_heads, max_kv_splits, v.shape[-1], dtype=torch.float32)
    partial_lse = i.q.new_empty(num_seqs, num_q_heads, max_kv_splits, dtype=torch.float32)
    splits = torch.full((num_seqs,), max_kv_splits, dtype=torch.int32, device=i.q.device)

    def call() -> Tensor:
        forward(i.q, k, v, i.out, starts, live, partial_out, partial_lse, splits, max_kv_splits, i.scale, 1.0, 1.0)
        out: Tensor = i.out
        return out

    return call


@SGLANG.kernel(
    "merge_states",
    needs={"merge": _ops("merge_state:merge_state_triton")},
    supports=attnfuzz.Supports(dtypes=("float16", "bfloat16"), lse_layout="TH"),
)
def merge_state(i: Any, *, merge: Any) -> tuple[Tensor, Tensor]:
    """The merge of two states."""
    out, lse = merge(i.prefix_output, i.prefix_lse, i.suffix_output, i.suffix_lse, i.output, i.output_lse)
    return out, lse
