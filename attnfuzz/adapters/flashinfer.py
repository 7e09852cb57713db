"""FlashInfer's paged wrappers and its merge. Workspaces are kept from call to call, as servers do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attnfuzz

__all__ = ["batch_decode", "batch_prefill", "merge_state"]

FLASHINFER = attnfuzz.Engine("flashinfer-python", tried=("0.5.3",))
_WORKSPACE_BYTES = 128 << 20
_CACHES: dict[str, Any] = {
    "dtypes": ("float16", "bfloat16"),
    "layouts": ("NHD", "HND"),
    "head_sizes": (64, 128),
    "lse": "base2",
}


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _pages(i: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Its form of a block table: where each sequence's pages begin, all pages, and the tokens of each last page."""
    lengths = i.seq_lens.cpu()
    counts = (lengths + i.block_size - 1) // i.block_size
    starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    pages = torch.cat([row[:count] for row, count in zip(i.block_table, counts.tolist(), strict=True)])
    last = torch.where(lengths > 0, (lengths - 1) % i.block_size + 1, 0).int()
    return starts.to(i.q.device), pages, last.to(i.q.device)


def _heads(i: Any) -> tuple[int, int, int, int]:
    return i.q.shape[1], i.k_cache.shape[2 if i.layout == "NHD" else 1], i.q.shape[2], i.block_size


@FLASHINFER.kernel(
    "paged_decode",
    needs={"make": ("flashinfer:BatchDecodeWithPagedKVCacheWrapper",)},
    supports=attnfuzz.Supports(**_CACHES, gqa_ratios=(1, 2, 3, 4, 8)),
    options={"use_tensor_cores": (False, True)},
)
def batch_decode(i: Any, *, make: Any, use_tensor_cores: bool) -> Callable[[], tuple[Tensor, Tensor]]:
    """`BatchDecodeWithPagedKVCacheWrapper`; with tensor cores that is its prefill kernel."""
    wrapper = make(_workspace(i.q.device), i.layout, use_tensor_cores=use_tensor_cores)
    wrapper.plan(*_pages(i), *_heads(i), sm_scale=i.scale, q_data_type=i.q.dtype, kv_data_type=i.k_cache.dtype)
    return lambda: wrapper.run(i.q, (i.k_cache, i.v_cache), out=i.out, lse=i.lse, return_lse=True)


@FLASHINFER.kernel(
    "paged_attention",
    needs={"make": ("flashinfer:BatchPrefillWithPagedKVCacheWrapper",)},
    supports=attnfuzz.Supports(**_CACHES),
)
def batch_prefill(i: Any, *, make: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`BatchPrefillWithPagedKVCacheWrapper`, causal: prefill, decode and both in one batch."""
    wrapper = make(_workspace(i.q.device), i.layout)
    wrapper.plan(
        i.cu_seqlens_q, *_pages(i), *_heads(i), causal=True, sm_scale=i.scale, q_data_type=i.q.dtype,
        kv_data_type=i.k_cache.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(i.q, (i.k_cache, i.v_cache), return_lse=True)


@FLASHINFER.kernel(
    "merge_states",
    needs={"merge": ("flashinfer:merge_state",)},
    supports=attnfuzz.Supports(
        dtypes=("float16", "bfloat16"),
        head_sizes=(64, 128, 256),
        empty_state_lse=("-inf",),
        lse="base2",
        lse_layout="TH",
    ),
)
def merge_state(i: Any, *, merge: Any) -> tuple[Tensor, Tensor]:
    """The merge of two states, whose LSEs are to base 2."""
    out, lse = merge(i.prefix_output, i.prefix_lse, i.suffix_output, i.suffix_lse)
    return out, lse
