"""Latent attention of several query tokens of each sequence, as verifying draft tokens needs it.

As ``latent_decode``, but a program's rows are query tokens times heads: all of them read the same keys, so a tile of
the cache is loaded once for all new tokens. Only how far a row sees differs, and only among the new tokens:

    row = query token · num_heads + head        limit(row) = seq_len - query_len + query token + 1

A cache of 8 bits has latent vectors in float8, a scale for each ``SCALED`` numbers of one, and beside these the part of
a key that turns with the position, which stays in 16 bits, since small angles matter there.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl


# As in dense_decode: no specialisation on what only places a base pointer or divides an index.
@triton.jit(
    do_not_specialize=[
        "num_heads", "block_size", "is_causal", "stride_qt", "stride_qh", "stride_ss", "stride_table", "stride_ot",
        "stride_oh",
    ]
)  # fmt: skip
def latent_verify_kernel(
    # tensors, each followed by its strides in elements; last dimensions are contiguous
    p_q, stride_qt, stride_qh,  # [tokens, num_heads, rank + rope_size]
    p_latents, stride_ls,  # [num_slots, 1, rank]: a part of wider rows, or float8
    p_ropes, stride_rs,  # [num_slots, 1, rope_size]
    p_scales, stride_ss,  # [num_slots, cdiv(rank, SCALED)], or None
    p_table, stride_table,  # [sequences, pages]
    p_seq_lens,  # [sequences], with the new tokens
    p_cu_seqlens,  # [sequences + 1], of query tokens
    p_out, stride_ot, stride_oh,  # [tokens, num_heads, rank]
    p_lse,  # [tokens, num_heads], or None
    # scalars
    scale,
    num_heads, block_size, is_causal,
    rank, rope_size,
    # constants
    SCALED: tl.constexpr,
    TILE: tl.constexpr,  # tokens per step, a power of two, whatever the page size
    BLOCK_M: tl.constexpr,  # rows of a program: a power of two of at least 16, for tl.dot
    BLOCK_R: tl.constexpr,  # rank rounded up to a power of two of at least 16
    BLOCK_P: tl.constexpr,  # rope_size likewise
):  # fmt: skip
    """Grid ``sequences, cdiv(most query tokens * num_heads, BLOCK_M)``."""
    i_seq = tl.program_id(0).to(tl.int64)
    first = tl.load(p_cu_seqlens + i_seq).to(tl.int64)
    query_len = tl.load(p_cu_seqlens + i_seq + 1).to(tl.int64) - first
    i_row = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = i_row < query_len * num_heads
    i_q = i_row // num_heads
    i_head = i_row % num_heads
    o_t = tl.arange(0, TILE)
    o_r = tl.arange(0, BLOCK_R).to(tl.int64)
    m_r = o_r < rank
    o_p = tl.arange(0, BLOCK_P).to(tl.int64)
    m_p = o_p < rope_size
    seq_len = tl.load(p_seq_lens + i_seq).to(tl.int64)
    limit = seq_len - (query_len - i_q - 1) * is_causal

    p_rows = p_q + (first + i_q)[:, None] * stride_qt + i_head[:, None] * stride_qh
    m_rr = m_row[:, None] & m_r[None, :]
    b_q = tl.load(p_rows + o_r[None, :], mask=m_rr, other=0.0)  # [BLOCK_M, BLOCK_R]
    b_q_rope = tl.load(
        p_rows + (rank + o_p)[None, :], mask=m_row[:, None] & m_p[None, :], other=0.0
    )  # [BLOCK_M, BLOCK_P]

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for start in range(0, seq_len, TILE):
        i_t = start + o_t
        m_t = i_t < seq_len
        # Entries past the last page may be anything and are not read. Ids are int64 before they meet a stride.
        i_block = tl.load(p_table + i_seq * stride_table + i_t // block_size, mask=m_t, other=0).to(tl.int64)  # [TILE]
        i_slot = i_block * block_size + i_t % block_size
        # Dead rows of a page may hold NaN: they are not read, since 0 · NaN is not 0.
        m_tr = m_t[:, None] & m_r[None, :]
        m_tp = m_t[:, None] & m_p[None, :]
        b_latent = tl.load(
            p_latents + (i_slot * stride_ls)[:, None] + o_r[None, :], mask=m_tr, other=0.0
        )  # [TILE, BLOCK_R]
        if p_scales is not None:
            p_scale = p_scales + (i_slot * stride_ss)[:, None] + (o_r // SCALED)[None, :]
            b_scale = tl.load(p_scale, mask=m_tr, other=0.0)  # [TILE, BLOCK_R]
            b_latent = (b_latent.to(tl.float32) * b_scale).to(b_q.dtype)
        b_rope = tl.load(
            p_ropes + (i_slot * stride_rs)[:, None] + o_p[None, :], mask=m_tp, other=0.0
        )  # [TILE, BLOCK_P]
        b_s = tl.dot(b_q, tl.trans(b_latent))  # [BLOCK_M, TILE]
        b_s = tl.dot(b_q_rope, tl.trans(b_rope), b_s) * scale
        b_s = tl.where(i_t[None, :] < limit[:, None], b_s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, axis=1))
        ref = tl.where(new_max == float("-inf"), 0.0, new_max)  # a tile may lie behind all that a row sees
        alpha = tl.exp(row_max - ref)
        b_w = tl.exp(b_s - ref[:, None])  # [BLOCK_M, TILE]
        exp_sum = exp_sum * alpha + tl.sum(b_w, axis=1)
        acc = tl.dot(b_w.to(b_latent.dtype), b_latent, acc * alpha[:, None])
        row_max = new_max

    divisor = tl.where(exp_sum == 0.0, 1.0, exp_sum)
    b_out = acc / divisor[:, None]  # [BLOCK_M, BLOCK_R]
    o_out = (first + i_q)[:, None] * stride_ot + i_head[:, None] * stride_oh + o_r[None, :]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_rr)
    if p_lse is not None:
        tl.store(p_lse + (first + i_q) * num_heads + i_head, row_max + tl.log(divisor), mask=m_row)
