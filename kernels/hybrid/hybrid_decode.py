"""Decode over pages that layers of several kinds share, with chunked local attention.

An entry of the block table names a page of the cache's manager, which is padded to the size that the largest of its
layers needs, and divided into blocks. The last token of a sequence sees the tokens of its own chunk up to itself.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl


# As in dense_decode: no specialisation on what only places a base pointer or divides an index.
@triton.jit(do_not_specialize=["group", "page_size", "block", "chunk", "stride_qs", "stride_bs", "stride_os"])
def hybrid_decode_kernel(
    # tensors, each followed by its strides in elements; last dimensions are contiguous
    p_q, stride_qs, stride_qh,  # [num_seqs, num_q_heads, head_size]
    p_k, stride_kp, stride_kb, stride_kt, stride_kh,  # [pages, blocks, tokens, num_kv_heads, head_size]
    p_v, stride_vp, stride_vb, stride_vt, stride_vh,
    p_table, stride_bs,  # [num_seqs, columns]
    p_lens,  # [num_seqs]
    p_out, stride_os, stride_oh,  # as q
    # scalars
    scale,
    group,  # query heads per KV head
    page_size, block,  # tokens of a page, and of a block of it
    chunk,  # tokens, or 0 for none
    head_size,
    # constants
    TILE: tl.constexpr,  # tokens per step, a power of two
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
):  # fmt: skip
    """Grid ``num_seqs, num_q_heads``."""
    i_seq = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    i_kv = i_head // group
    seq_len = tl.load(p_lens + i_seq)
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    m_d = o_d < head_size
    b_q = tl.load(p_q + i_seq * stride_qs + i_head * stride_qh + o_d, mask=m_d, other=0.0).to(tl.float32) * scale

    first = 0
    if chunk > 0:
        first = tl.maximum(seq_len - 1, 0) // chunk * chunk
    row_max = float("-inf")
    exp_sum = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(first, seq_len, TILE):
        o_t = start + tl.arange(0, TILE)
        m_t = o_t < seq_len
        i_page = tl.load(p_table + i_seq * stride_bs + o_t // page_size, mask=m_t, other=0).to(tl.int64)
        i_block, i_token = o_t % page_size // block, o_t % page_size % block
        m_td = m_t[:, None] & m_d[None, :]
        at_k = i_page * stride_kp + i_block * stride_kb + i_token * stride_kt + i_kv * stride_kh
        at_v = i_page * stride_vp + i_block * stride_vb + i_token * stride_vt + i_kv * stride_vh
        b_k = tl.load(p_k + at_k[:, None] + o_d[None, :], mask=m_td, other=0.0).to(tl.float32)
        b_v = tl.load(p_v + at_v[:, None] + o_d[None, :], mask=m_td, other=0.0).to(tl.float32)
        b_s = tl.where(m_t, tl.sum(b_k * b_q[None, :], axis=1), float("-inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, axis=0))  # finite: a tile has a token
        alpha = tl.exp(row_max - new_max)
        b_w = tl.exp(b_s - new_max)
        exp_sum = exp_sum * alpha + tl.sum(b_w, axis=0)
        acc = acc * alpha + tl.sum(b_w[:, None] * b_v, axis=0)
        row_max = new_max

    b_out = acc / tl.where(exp_sum == 0.0, 1.0, exp_sum)
    tl.store(p_out + i_seq * stride_os + i_head * stride_oh + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)
