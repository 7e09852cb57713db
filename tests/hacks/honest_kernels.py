"""The kernel that the hacks of this folder pretend to be, right throughout: one program for each row and query head.

It declares its layout and nothing else. It must pass `attnfuzz verify`.
"""

# mypy: disable-error-code="import-not-found, no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import attnfuzz
from attnfuzz.kernels.eager import paged_decode

SUPPORTS = attnfuzz.Supports(layouts=("NHD",))


@triton.jit
def _decode(
    q, k, v, table, lens, out, lse, scale, group,
    q_seq, q_head, q_dim, k_page, k_slot, k_head, k_dim, v_page, v_slot, v_head, v_dim, t_seq, t_page, l_seq,
    o_seq, o_head, o_dim, lse_seq, lse_head,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    kv_head = head // group
    seq_len = tl.load(lens + seq * l_seq)
    d, t = tl.arange(0, PADDED).to(tl.int64), tl.arange(0, BLOCK).to(tl.int64)
    in_head = d < DIM
    query = tl.load(q + seq * q_seq + head * q_head + d * q_dim, mask=in_head, other=0.0).to(tl.float32)
    m, total, acc = float("-inf"), 0.0, tl.zeros([PADDED], tl.float32)
    for start in range(0, seq_len, BLOCK):
        token = start + t
        live = token < seq_len
        page = tl.load(table + seq * t_seq + token // PAGE * t_page, mask=live, other=0).to(tl.int64)
        slot, mask = token % PAGE, live[:, None] & in_head[None, :]
        k_at = (page * k_page + slot * k_slot)[:, None] + kv_head * k_head + d[None, :] * k_dim
        v_at = (page * v_page + slot * v_slot)[:, None] + kv_head * v_head + d[None, :] * v_dim
        key = tl.load(k + k_at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(v + v_at, mask=mask, other=0.0).to(tl.float32)
        score = tl.where(live, tl.sum(query[None, :] * key, axis=1) * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, axis=0))
        weight, rescale = tl.exp(score - m_new), tl.exp(m - m_new)
        total = total * rescale + tl.sum(weight, axis=0)
        acc = acc * rescale + tl.sum(weight[:, None] * value, axis=0)
        m = m_new
    result = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + seq * o_seq + head * o_head + d * o_dim, result.to(out.dtype.element_ty), mask=in_head)
    tl.store(lse + seq * lse_seq + head * lse_head, tl.where(total == 0.0, float("-inf"), m + tl.log(total)))


def attend(i: Any, out: Tensor | None = None, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention, as it is asked for."""
    num_seqs, num_q_heads, head_size = i.q.shape
    if out is None:
        out = torch.empty(i.out.shape, dtype=i.q.dtype, device=i.q.device)
    if lse is None:
        lse = torch.empty(i.lse.shape, dtype=torch.float32, device=i.q.device)
    _decode[(num_seqs, num_q_heads)](
        i.q, i.k_cache, i.v_cache, i.block_table, i.seq_lens, out, lse, i.scale, num_q_heads // i.k_cache.shape[2],
        *i.q.stride(), *i.k_cache.stride(), *i.v_cache.stride(), *i.block_table.stride(), *i.seq_lens.stride(),
        *out.stride(), *lse.stride(),
        PAGE=i.block_size, BLOCK=16, DIM=head_size, PADDED=triton.next_power_of_2(head_size),
    )  # fmt: skip
    return out, lse


def attend_eagerly(i: Any) -> tuple[Tensor, Tensor]:
    """The same by torch alone, which takes a small part of the time of Triton's interpreter."""
    return paged_decode(i.q, i.k_cache, i.v_cache, i.block_table, i.seq_lens, i.scale, i.block_size, "NHD")


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def honest(i: Any) -> tuple[Tensor, Tensor]:
    """No hack."""
    return attend(i)
