"""Stand-ins for packages that are seldom installed: what their documentation says of their arguments, in PyTorch."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "flash_attn",
    "flashinfer",
    "module",
    "sglang_decode",
    "sglang_merge",
    "varlen_attn",
    "vllm_merge",
    "vllm_unified",
]


def module(name: str, **attributes: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(attributes)
    return made


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the last queries: ``q [n, Hq, D]``, ``k, v [N, Hkv, D]``."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, dim=1).float() for part in (k, v))
    scores = scale * torch.einsum("qhd,khd->hqk", q.float(), k)
    hidden = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """torch.nn.attention.varlen."""
    if window_size != (-1, 0) or not enable_gqa or max_q < 1 or max_k < 1:
        raise ValueError("causal attention with fewer KV heads is what is compared")
    return _rows(query, key, value, cu_seq_q, cu_seq_k, scale)


def _rows(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, scale: float) -> Tensor:
    spans = zip(ends_q.tolist(), ends_q.tolist()[1:], ends_k.tolist(), ends_k.tolist()[1:], strict=False)
    return torch.cat([attend(q[a:b], k[c:d], v[c:d], scale) for a, b, c, d in spans])


def flash_attn_with_kvcache(
    q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, softmax_scale: float, causal: bool
) -> Tensor:
    del causal
    lens = cache_seqlens.tolist()
    return torch.stack([attend(q[i], k[i, :n], v[i, :n], softmax_scale) for i, n in enumerate(lens)])


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int,
    *, softmax_scale: float, causal: bool,
) -> Tensor:  # fmt: skip
    del max_q, max_k, causal
    return _rows(q, k, v, ends_q, ends_k, softmax_scale)


flash_attn = module(
    "flash_attn", flash_attn_with_kvcache=flash_attn_with_kvcache, flash_attn_varlen_func=flash_attn_varlen_func
)


class _Wrapper:
    def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool = False) -> None:
        del workspace, use_tensor_cores
        self._plan: Any = None
        self._layout = layout

    def _attend(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor, ends_q: list[int]) -> Tensor:
        (indptr, indices, last, page_size), scale = self._plan
        for i, (start, end) in enumerate(zip(indptr.tolist(), indptr.tolist()[1:], strict=False)):
            n = (end - start - 1) * page_size + int(last[i])
            k, v = (part[indices[start:end].long()].flatten(0, 1)[:n] for part in cache)
            rows = slice(ends_q[i], ends_q[i + 1])
            out[rows] = attend(q[rows], k, v, scale)
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, indptr: Tensor, indices: Tensor, last: Tensor, q_heads: int, kv_heads: int, size: int, page_size: int,
        *, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        del q_heads, kv_heads, size, q_data_type, kv_data_type
        self._plan = (indptr, indices, last, page_size), sm_scale

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        return self._attend(q, cache, out, list(range(len(q) + 1)))


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, q_heads: int, kv_heads: int, size: int,
        page_size: int, *, causal: bool, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        del q_heads, kv_heads, size, causal, q_data_type, kv_data_type
        self._ends = qo_indptr.tolist()
        self._plan = (indptr, indices, last, page_size), sm_scale

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        return self._attend(q, cache, out, self._ends)


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """LSEs to base 2, ``[tokens, heads]``."""
    out, lse = merged(v_a, s_a * math.log(2), v_b, s_b * math.log(2))
    return out, lse / math.log(2)


def merged(p: Tensor, p_lse: Tensor, s: Tensor, s_lse: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(p_lse, s_lse)
    weights = torch.exp(p_lse - lse)[..., None], torch.exp(s_lse - lse)[..., None]
    return (weights[0] * p + weights[1] * s).to(p.dtype), lse


flashinfer = module(
    "flashinfer",
    BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
    merge_state=merge_state,
)


def vllm_unified(*, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
                 softmax_scale: float, block_table: Tensor, **others: Any) -> None:  # fmt: skip
    del others
    ends = cu_seqlens_q.tolist()
    for i, n in enumerate(seqused_k.tolist()):
        pages = block_table[i, : -(-n // k.shape[1])].long()
        keys, values = (part[pages].flatten(0, 1)[:n] for part in (k, v))
        out[ends[i] : ends[i + 1]] = attend(q[ends[i] : ends[i + 1]], keys, values, softmax_scale)


def vllm_merge(out: Tensor, p: Tensor, p_lse: Tensor, s: Tensor, s_lse: Tensor, lse: Tensor) -> None:
    """LSEs ``[heads, tokens]``."""
    found, found_lse = merged(p, p_lse.mT, s, s_lse.mT)
    out.copy_(found)
    lse.copy_(found_lse.mT)


def sglang_decode(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, starts: Tensor, indices: Tensor, partial_out: Tensor,
    partial_lse: Tensor, splits: Tensor, max_splits: int, scale: float, k_scale: float, v_scale: float,
) -> None:  # fmt: skip
    if partial_out.shape[:3] != partial_lse.shape or len(splits) != len(q) or k_scale != 1 or v_scale != 1:
        raise ValueError(f"workspaces for {max_splits} splits do not fit")
    for i, (start, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        slots = indices[start:end].long()
        out[i] = attend(q[i : i + 1], k[slots], v[slots], scale)[0]


def sglang_merge(p: Tensor, p_lse: Tensor, s: Tensor, s_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """LSEs ``[tokens, heads]``."""
    found, found_lse = merged(p, p_lse, s, s_lse)
    out.copy_(found)
    lse.copy_(found_lse)
