"""FlashAttention as its own packages ship it: version 2 (`flash_attn`), and version 3 (`flash_attn_interface`).

Version 2 gives a row without keys a log-sum-exp of +inf, so it is not asked for any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attnfuzz

FLASH_ATTENTION_2 = attnfuzz.Engine("flash-attn", tried=("2.8.3.post2",), gpu_only=True)
FLASH_ATTENTION_3 = attnfuzz.Engine("flash_attn_3", tried=("3.0.0b1",), gpu_only=True)
_CACHES: dict[str, Any] = {"dtypes": ("float16", "bfloat16"), "layouts": ("NHD", "interleaved")}
_TWO: dict[str, Any] = {
    **_CACHES,
    "head_sizes": (32, 64, 96, 128, 192, 256),
    "block_sizes": (256, 512),  # it raises an error for what is no multiple of 256
    "variants": ("window", "soft_cap", "alibi"),
    "empty_sequences": False,
}
_THREE: dict[str, Any] = {**_CACHES, "head_sizes": (64, 96, 128, 192, 256), "variants": ("window", "soft_cap")}
_NUMERICS = attnfuzz.Numerics(row_sum="float32", partials="float32", tanh="approximate")
_SPLITS = {"num_splits": (0, 1, 8)}
"""0: as many as it finds best."""


def _window(i: Any) -> tuple[int, int]:
    """Its form of a window, which does not count the query itself."""
    return (-1, -1) if i.window is None else (i.window - 1, 0)


@FLASH_ATTENTION_2.kernel(
    "paged_decode",
    needs={"attend": ("flash_attn:flash_attn_with_kvcache",)},
    supports=attnfuzz.Supports(**_TWO, graph_replay=True),
    options=_SPLITS,
    numerics=_NUMERICS,
)
def with_kvcache(i: Any, *, attend: Any, num_splits: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """`flash_attn_with_kvcache` with a block table, one query token of each sequence."""

    def call() -> tuple[Tensor, Tensor]:
        out, lse = attend(
            i.q[:, None], i.k_cache, i.v_cache, cache_seqlens=i.seq_lens, block_table=i.block_table,
            softmax_scale=i.scale, causal=True, window_size=_window(i), softcap=i.soft_cap or 0.0,
            alibi_slopes=i.alibi_slopes, num_splits=num_splits, return_softmax_lse=True,
        )  # fmt: skip
        return out[:, 0], lse[:, :, 0]

    return call


@FLASH_ATTENTION_2.kernel(
    "paged_attention",
    needs={"attend": ("flash_attn:flash_attn_varlen_func",)},
    supports=attnfuzz.Supports(**_TWO, padding_tokens=False, graph_replay=True),
    numerics=_NUMERICS,
)
def varlen(i: Any, *, attend: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`flash_attn_varlen_func` with a block table: prefill, decode and both in one batch.

    Where no sequence has more than one query token it takes q for as many rows as there are sequences.
    """

    def call() -> tuple[Tensor, Tensor]:
        ends = torch.nn.functional.pad(i.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        out, lse, _ = attend(
            i.q, i.k_cache, i.v_cache, i.cu_seqlens_q, ends, i.max_query_len, i.max_seq_len, softmax_scale=i.scale,
            causal=True, window_size=_window(i), softcap=i.soft_cap or 0.0, alibi_slopes=i.alibi_slopes,
            return_attn_probs=True, block_table=i.block_table,
        )  # fmt: skip
        return out, lse.mT

    return call


@FLASH_ATTENTION_3.kernel(
    "paged_decode",
    needs={"attend": ("flash_attn_interface:flash_attn_with_kvcache",)},
    supports=attnfuzz.Supports(**_THREE, graph_replay=True),
    options=_SPLITS,
    numerics=_NUMERICS,
)
def v3_with_kvcache(i: Any, *, attend: Any, num_splits: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Version 3's `flash_attn_with_kvcache`, one query token of each sequence."""

    def call() -> tuple[Tensor, Tensor]:
        out, lse, *_ = attend(
            i.q[:, None], i.k_cache, i.v_cache, cache_seqlens=i.seq_lens, page_table=i.block_table,
            softmax_scale=i.scale, causal=True, window_size=_window(i), softcap=i.soft_cap or 0.0,
            num_splits=num_splits, return_softmax_lse=True,
        )  # fmt: skip
        return out[:, 0], lse[:, :, 0]

    return call


@FLASH_ATTENTION_3.kernel(
    "paged_attention",
    needs={"attend": ("flash_attn_interface:flash_attn_with_kvcache",)},
    supports=attnfuzz.Supports(**_THREE, graph_replay=True),
    options=_SPLITS,
    numerics=_NUMERICS,
)
def v3_varlen(i: Any, *, attend: Any, num_splits: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """`v3_with_kvcache` with the query tokens of all sequences in a row; `flash_attn_varlen_func` takes no block table
    there."""

    def call() -> tuple[Tensor, Tensor]:
        out, lse, *_ = attend(
            i.q, i.k_cache, i.v_cache, cache_seqlens=i.seq_lens, page_table=i.block_table,
            cu_seqlens_q=i.cu_seqlens_q, max_seqlen_q=i.max_query_len, softmax_scale=i.scale, causal=True,
            window_size=_window(i), softcap=i.soft_cap or 0.0, num_splits=num_splits, return_softmax_lse=True,
        )  # fmt: skip
        return out, lse.mT

    return call
