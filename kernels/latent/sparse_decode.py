"""Latent attention over lists of slots: DeepSeek's sparse attention, after its indexer has chosen the slots.

As ``latent_decode``, but for where a token's rows lie: place i of a query token's list holds a slot of the cache, or a
sentinel, which is any number that is none. A page table says where a *sequence* lies, so that its order is that of
time; a list has no order, a slot may stand in it twice, and then counts twice. A cache of 8 bits is as in
``latent_verify``.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

__all__ = ["sparse_decode_kernel"]


# As in dense_decode: no specialisation on what only places a base pointer or divides an index.
@triton.jit(
    do_not_specialize=[
        "num_heads",
        "num_slots",
        "topk",
        "has_lengths",
        "stride_qt",
        "stride_qh",
        "stride_ls",
        "stride_rs",
        "stride_ss",
        "stride_it",
        "stride_ot",
        "stride_oh",
    ]
)
def sparse_decode_kernel(
    # tensors, each followed by its strides in elements; last dimensions are contiguous
    p_q, stride_qt, stride_qh,  # [tokens, num_heads, rank + rope_size]
    p_latents, stride_ls,  # [num_slots, 1, rank]: a part of wider rows
    p_ropes, stride_rs,  # [num_slots, 1, rope_size]: likewise
    p_scales, stride_ss,  # [num_slots, 1, cdiv(rank, SCALED)], or None
    p_indices, stride_it,  # [tokens, topk]
    p_lengths,  # [tokens]: places of a list that count; without has_lengths all do, and it is not read
    p_out, stride_ot, stride_oh,  # [tokens, num_heads, rank]
    p_lse,  # [tokens, num_heads], or None
    # scalars
    scale,
    num_heads, num_slots, topk, has_lengths,
    rank, rope_size,
    # constants
    SCALED: tl.constexpr,
    TILE: tl.constexpr,  # places of a list per step, a power of two
    BLOCK_M: tl.constexpr,  # query heads of a program: a power of two of at least 16, for tl.dot
    BLOCK_R: tl.constexpr,  # rank rounded up to a power of two of at least 16
    BLOCK_P: tl.constexpr,  # rope_size likewise
    HAS_ROPE: tl.constexpr,
):  # fmt: skip
    """Grid ``tokens, cdiv(num_heads, BLOCK_M)``."""
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_head = i_head < num_heads
    o_i = tl.arange(0, TILE)
    o_r = tl.arange(0, BLOCK_R).to(tl.int64)
    m_r = o_r < rank
    o_p = tl.arange(0, BLOCK_P).to(tl.int64)
    m_p = o_p < rope_size

    p_heads = p_q + i_token * stride_qt + i_head[:, None] * stride_qh
    m_hr = m_head[:, None] & m_r[None, :]
    b_q = tl.load(p_heads + o_r[None, :], mask=m_hr, other=0.0)  # [BLOCK_M, BLOCK_R]
    if HAS_ROPE:
        m_hp = m_head[:, None] & m_p[None, :]
        b_q_rope = tl.load(p_heads + (rank + o_p)[None, :], mask=m_hp, other=0.0)  # [BLOCK_M, BLOCK_P]

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    topk = tl.load(p_lengths + i_token, mask=has_lengths > 0, other=topk)
    for start in range(0, topk, TILE):
        m_i = start + o_i < topk
        i_slot = tl.load(p_indices + i_token * stride_it + start + o_i, mask=m_i, other=-1).to(tl.int64)  # [TILE]
        # A slot that no list names may hold NaN, and a sentinel names none: neither is read, since 0 · NaN is not 0.
        m_t = (i_slot >= 0) & (i_slot < num_slots)
        i_slot = tl.where(m_t, i_slot, 0)[:, None]
        m_tr = m_t[:, None] & m_r[None, :]
        b_latent = tl.load(p_latents + i_slot * stride_ls + o_r[None, :], mask=m_tr, other=0.0)  # [TILE, BLOCK_R]
        if p_scales is not None:
            b_scale = tl.load(p_scales + i_slot * stride_ss + (o_r // SCALED)[None, :], mask=m_tr, other=0.0)
            b_latent = (b_latent.to(tl.float32) * b_scale).to(b_q.dtype)
        b_s = tl.dot(b_q, tl.trans(b_latent))  # [BLOCK_M, TILE]
        if HAS_ROPE:
            m_tp = m_t[:, None] & m_p[None, :]
            b_rope = tl.load(p_ropes + i_slot * stride_rs + o_p[None, :], mask=m_tp, other=0.0)  # [TILE, BLOCK_P]
            b_s = tl.dot(b_q_rope, tl.trans(b_rope), b_s)
        b_s = tl.where(m_t[None, :], b_s * scale, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, axis=1))
        ref = tl.where(new_max == float("-inf"), 0.0, new_max)  # a tile, or a whole list, may name no slot
        alpha = tl.exp(row_max - ref)
        b_w = tl.exp(b_s - ref[:, None])  # [BLOCK_M, TILE]
        exp_sum = exp_sum * alpha + tl.sum(b_w, axis=1)
        acc = tl.dot(b_w.to(b_latent.dtype), b_latent, acc * alpha[:, None])
        row_max = new_max

    divisor = tl.where(exp_sum == 0.0, 1.0, exp_sum)
    b_out = acc / divisor[:, None]  # [BLOCK_M, BLOCK_R]
    o_out = i_token * stride_ot + i_head[:, None] * stride_oh + o_r[None, :]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_hr)
    if p_lse is not None:
        tl.store(p_lse + i_token * num_heads + i_head, row_max + tl.log(divisor), mask=m_head)
