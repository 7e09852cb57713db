"""A correct kernel as users have them: one program per sequence and KV head, products through tl.dot.

All query heads of a group share each KV tile. Probabilities are rounded to the dtype of V before the second product,
and nothing is declared about numerics.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import attnfuzz


@triton.jit
def grouped_decode_kernel(
    p_q, p_k, p_v, p_table, p_lens, p_out, p_lse,
    scale, group_size, block_size, head_size,
    stride_qs, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_table, stride_os, stride_oh, stride_lse,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid ``(num_seqs, num_kv_heads)``; last dimensions are contiguous."""
    i_seq, i_kv_head = tl.program_id(0), tl.program_id(1)
    o_m, o_t, o_d = tl.arange(0, BLOCK_M), tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    m_d = o_d < head_size
    m_md = (o_m < group_size)[:, None] & m_d[None, :]
    i_head = i_kv_head * group_size + o_m
    b_q = tl.load(p_q + i_seq * stride_qs + i_head[:, None] * stride_qh + o_d[None, :], mask=m_md, other=0.0)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    seq_len = tl.load(p_lens + i_seq)
    for start in range(0, seq_len, TILE):
        i_t = start + o_t
        m_t = i_t < seq_len
        m_td = m_t[:, None] & m_d[None, :]
        i_block = tl.load(p_table + i_seq * stride_table + i_t // block_size, mask=m_t, other=0).to(tl.int64)
        o_kt = i_block * stride_kb + (i_t % block_size) * stride_kt + i_kv_head * stride_kh
        o_vt = i_block * stride_vb + (i_t % block_size) * stride_vt + i_kv_head * stride_vh
        b_k = tl.load(p_k + o_kt[:, None] + o_d[None, :], mask=m_td, other=0.0)  # [TILE, BLOCK_D]
        b_v = tl.load(p_v + o_vt[:, None] + o_d[None, :], mask=m_td, other=0.0)  # [TILE, BLOCK_D]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale  # [BLOCK_M, TILE]
        b_s = tl.where(m_t[None, :], b_s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, 1))
        b_p = tl.exp(b_s - new_max[:, None])
        alpha = tl.exp(row_max - new_max)
        exp_sum = exp_sum * alpha + tl.sum(b_p, 1)
        acc = acc * alpha[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
        row_max = new_max
    b_out = acc / tl.where(exp_sum > 0, exp_sum, 1.0)[:, None]
    o_out = i_seq * stride_os + i_head[:, None] * stride_oh + o_d[None, :]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_md)
    tl.store(p_lse + i_seq * stride_lse + i_head, row_max + tl.log(exp_sum), mask=o_m < group_size)


@attnfuzz.kernel(
    "paged_decode",
    supports=attnfuzz.Supports(layouts=("NHD", "HND", "interleaved"), strides="contiguous"),
)
def grouped_decode(inputs: Any) -> tuple[Tensor, Tensor]:
    """On caches whose heads are contiguous."""
    q = inputs.q
    num_seqs, num_q_heads, head_size = q.shape
    by_token = (c.transpose(1, 2) if inputs.layout == "HND" else c for c in (inputs.k_cache, inputs.v_cache))
    k, v = by_token
    out, lse = torch.empty_like(q), q.new_empty((num_seqs, num_q_heads), dtype=torch.float32)
    group_size = num_q_heads // k.shape[2]
    grouped_decode_kernel[(num_seqs, k.shape[2])](
        q, k, v, inputs.block_table, inputs.seq_lens, out, lse,
        inputs.scale, group_size, inputs.block_size, head_size,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3],
        inputs.block_table.stride(0), *out.stride()[:2], lse.stride(0),
        BLOCK_M=max(16, triton.next_power_of_2(group_size)), TILE=32, BLOCK_D=triton.next_power_of_2(head_size),
    )  # fmt: skip
    return out, lse
