"""PyTorch's own attention: scaled_dot_product_attention, and the varlen call on sequences in a row."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

import attnfuzz

__all__ = ["sdpa", "sdpa_math", "varlen"]

TORCH = attnfuzz.Engine("torch", tried=("2.11.0", "2.13.0"))
_SDPA = {"attend": ("torch.nn.functional:scaled_dot_product_attention",)}


@TORCH.kernel("dense_decode", needs=_SDPA, supports=attnfuzz.Supports(dtypes=("float16", "bfloat16"), lse="none"))
def sdpa(i: Any, *, attend: Any) -> Callable[[], Tensor]:
    """With the backend that it chooses."""
    return _attending(i, attend)


@TORCH.kernel(
    "dense_decode",
    needs={**_SDPA, "choose": ("torch.nn.attention:sdpa_kernel",), "backend": ("torch.nn.attention:SDPBackend.MATH",)},
    supports=attnfuzz.Supports(lse="none"),
    numerics=attnfuzz.Numerics(query="scaled_both"),
)
def sdpa_math(i: Any, *, attend: Any, choose: Any, backend: Any) -> Callable[[], Tensor]:
    """With the backend of plain matrix products, which has the scale's root in q and in k."""
    return _attending(i, attend, lambda: choose(backend))


def _attending(
    i: Any, attend: Any, within: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Callable[[], Tensor]:
    """One call for sequences of one length, which need no mask; else one for each sequence."""
    lengths = i.seq_lens.tolist()
    if len(set(lengths)) == 1:
        parts = [(slice(None), lengths[0])]
    else:
        parts = [(slice(seq, seq + 1), length) for seq, length in enumerate(lengths)]
    cut = [
        (seqs, i.q[seqs, :, None], *(part[seqs, :length].transpose(1, 2) for part in (i.k, i.v)))
        for seqs, length in parts
    ]

    def call() -> Tensor:
        with within():
            for seqs, q, k, v in cut:
                i.out[seqs] = attend(q, k, v, scale=i.scale, enable_gqa=True)[:, :, 0]
        out: Tensor = i.out
        return out

    return call


@TORCH.kernel(
    "paged_attention",
    needs={"attend": ("torch.nn.attention.varlen:varlen_attn",)},
    supports=attnfuzz.Supports(
        dtypes=("float16", "bfloat16"),
        head_sizes=(16, 32, 40, 64, 72, 80, 96, 128, 192, 256),  # multiples of 8
        layouts=("NHD",),
        lse="none",
    ),
    gpu_only=True,
)
def varlen(i: Any, *, attend: Any) -> Callable[[], Tensor]:
    """`varlen_attn`, causal, on the keys and values of all sequences in a row: they are copied out of their pages."""
    lengths = i.seq_lens.tolist()
    counts = [-(-length // i.block_size) for length in lengths]
    k, v = (
        torch.cat(
            [
                cache[i.block_table[seq, :count].long()].flatten(0, 1)[:length]
                for seq, (count, length) in enumerate(zip(counts, lengths, strict=True))
            ]
        )
        for cache in (i.k_cache, i.v_cache)
    )
    ends = torch.nn.functional.pad(i.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    longest_q, longest = i.max_query_len, i.max_seq_len
    takes_switch = "enable_gqa" in inspect.signature(attend).parameters  # torch 2.11 has none and takes grouped heads
    more = {"enable_gqa": True} if takes_switch else {}
    return lambda: attend(
        i.q, k, v, i.cu_seqlens_q, ends, longest_q, longest, scale=i.scale, window_size=(-1, 0), **more
    )
