"""Naive dense decode attention: one query token per sequence, K and V in one dense tensor each.

One program per (sequence, query head) walks the sequence's keys in tiles and keeps an online softmax (see
``softmax_state``), so K and V are read once and no score leaves the program. Query heads share KV heads in groups
(GQA): ``kv_head = q_head // group_size``. Every head of a group reads its KV head again, and nothing is
prefetched: this is the simplest correct kernel, not a fast one.

The recurrence is that of FlashAttention (Dao et al., arXiv 2205.14135) with a single query row.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.softmax_state import store_state


# Strides that only place a program's base pointer are not specialised on (== 1, divisible by 16): that buys nothing
# and would compile the kernel again for each combination.
@triton.jit(
    do_not_specialize=[
        "group_size", "stride_qs", "stride_qh", "stride_len", "stride_os", "stride_oh", "stride_lse_s", "stride_lse_h",
    ]
)  # fmt: skip
def dense_decode_kernel(
    # tensors, each followed by its strides in elements
    p_q, stride_qs, stride_qh, stride_qd,  # [num_seqs, num_q_heads, head_size]
    p_k, stride_ks, stride_kt, stride_kh, stride_kd,  # [num_seqs, max_seq_len, num_kv_heads, head_size]
    p_v, stride_vs, stride_vt, stride_vh, stride_vd,  # [num_seqs, max_seq_len, num_kv_heads, v_head_size]
    p_seq_lens, stride_len,  # [num_seqs]
    p_out, stride_os, stride_oh, stride_od,  # [num_seqs, num_q_heads, v_head_size]
    p_lse, stride_lse_s, stride_lse_h,  # [num_seqs, num_q_heads]
    # scalars
    scale,
    group_size,  # query heads per KV head
    head_size, v_head_size,
    # constants
    TILE: tl.constexpr,  # keys per step, a power of two
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
    BLOCK_DV: tl.constexpr,  # v_head_size likewise
):  # fmt: skip
    """Grid ``(num_seqs, num_q_heads)``."""
    # Indices are int64 from the start: index times stride passes 2^31 in caches that fit on one GPU.
    i_seq = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    i_kv_head = i_head // group_size
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    o_dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    o_t = tl.arange(0, TILE).to(tl.int64)
    m_d = o_d < head_size
    m_dv = o_dv < v_head_size

    p_q += i_seq * stride_qs + i_head * stride_qh
    p_k += i_seq * stride_ks + i_kv_head * stride_kh
    p_v += i_seq * stride_vs + i_kv_head * stride_vh
    seq_len = tl.load(p_seq_lens + i_seq * stride_len)
    b_q = tl.load(p_q + o_d * stride_qd, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK_D]

    row_max = tl.full([], float("-inf"), tl.float32)
    exp_sum = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, seq_len, TILE):
        i_t = start + o_t
        m_t = i_t < seq_len
        m_td = m_t[:, None] & m_d[None, :]
        m_tdv = m_t[:, None] & m_dv[None, :]
        # Rows past seq_len may hold anything, NaN included: they are never read, since 0 · NaN is not 0.
        b_k = tl.load(p_k + (i_t * stride_kt)[:, None] + (o_d * stride_kd)[None, :], m_td, other=0.0)  # [TILE, BLOCK_D]
        o_v = (i_t * stride_vt)[:, None] + (o_dv * stride_vd)[None, :]
        b_v = tl.load(p_v + o_v, m_tdv, other=0.0)  # [TILE, BLOCK_DV]

        b_s = tl.sum(b_q[None, :] * b_k.to(tl.float32), axis=1) * scale  # [TILE]
        b_s = tl.where(m_t, b_s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, axis=0))
        ref = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp(row_max - ref)
        b_p = tl.exp(b_s - ref)  # [TILE]
        exp_sum = exp_sum * alpha + tl.sum(b_p, axis=0)
        acc = acc * alpha + tl.sum(b_p[:, None] * b_v.to(tl.float32), axis=0)
        row_max = new_max

    p_out += i_seq * stride_os + i_head * stride_oh
    p_lse += i_seq * stride_lse_s + i_head * stride_lse_h
    store_state(p_out, p_lse, o_dv, m_dv, stride_od, row_max, exp_sum, acc)
