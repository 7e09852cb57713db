"""Decode by lists of blocks over a paged cache, each list cut at the row's own position.

    limit(row) = seq_len - query_len + query token + 1

A block of a list is walked in tiles, whatever the size of a page. A block that begins behind the limit is not read.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl


# As in dense_decode: no specialisation on what only places a base pointer or divides an index.
@triton.jit(
    do_not_specialize=[
        "query_len", "page_size", "topk", "group", "stride_qr", "stride_ih", "stride_ir", "stride_bs", "stride_or",
    ]
)  # fmt: skip
def block_sparse_kernel(
    # tensors, each followed by its strides in elements; last dimensions are contiguous
    p_q, stride_qr, stride_qh,  # [rows, num_q_heads, head_size]
    p_k, stride_kp, stride_kt, stride_kh,  # [pages, tokens, num_kv_heads, head_size]
    p_v, stride_vp, stride_vt, stride_vh,
    p_table, stride_bs,  # [num_seqs, columns]
    p_lens,  # [num_seqs]
    p_lists, stride_ih, stride_ir,  # [num_kv_heads, rows, topk]
    p_out, stride_or, stride_oh,  # as q
    # scalars
    scale,
    query_len, page_size, topk,
    group,  # query heads per KV head
    head_size,
    # constants
    SPARSE: tl.constexpr,  # tokens of a block of a list, a multiple of TILE
    TILE: tl.constexpr,  # tokens per step, a power of two
    BLOCK_M: tl.constexpr,  # group rounded up to a power of two of at least 16, for tl.dot
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
):  # fmt: skip
    """Grid ``rows, num_kv_heads``."""
    i_row = tl.program_id(0).to(tl.int64)
    i_kv = tl.program_id(1).to(tl.int64)
    i_seq = i_row // query_len
    limit = tl.load(p_lens + i_seq) - query_len + (i_row % query_len).to(tl.int32) + 1
    o_g = tl.arange(0, BLOCK_M)
    i_head = i_kv * group + o_g
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    m_d = o_d < head_size
    m_hd = (o_g < group)[:, None] & m_d[None, :]
    b_q = tl.load(p_q + i_row * stride_qr + i_head[:, None] * stride_qh + o_d[None, :], mask=m_hd, other=0.0)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for place in range(0, topk):
        block = tl.load(p_lists + i_kv * stride_ih + i_row * stride_ir + place)
        first = tl.where(block >= 0, block * SPARSE, limit)  # a sentinel is walked in no step
        for start in range(first, tl.minimum(first + SPARSE, limit), TILE):
            o_t = start + tl.arange(0, TILE)
            # Tokens behind the limit may be dead, or no page have been named for them: neither is read.
            m_t = o_t < limit
            i_page = tl.load(p_table + i_seq * stride_bs + o_t // page_size, mask=m_t, other=0).to(tl.int64)
            i_token = o_t % page_size
            m_td = m_t[:, None] & m_d[None, :]
            at_k = i_page * stride_kp + i_token * stride_kt + i_kv * stride_kh
            at_v = i_page * stride_vp + i_token * stride_vt + i_kv * stride_vh
            b_k = tl.load(p_k + at_k[:, None] + o_d[None, :], mask=m_td, other=0.0)
            b_v = tl.load(p_v + at_v[:, None] + o_d[None, :], mask=m_td, other=0.0)
            b_s = tl.where(m_t[None, :], tl.dot(b_q, tl.trans(b_k)) * scale, float("-inf"))  # [BLOCK_M, TILE]
            new_max = tl.maximum(row_max, tl.max(b_s, axis=1))  # finite: a tile has a token
            alpha = tl.exp(row_max - new_max)
            b_w = tl.exp(b_s - new_max[:, None])
            exp_sum = exp_sum * alpha + tl.sum(b_w, axis=1)
            acc = tl.dot(b_w.to(b_v.dtype), b_v, acc * alpha[:, None])
            row_max = new_max

    b_out = acc / tl.where(exp_sum == 0.0, 1.0, exp_sum)[:, None]
    o_out = i_row * stride_or + i_head[:, None] * stride_oh + o_d[None, :]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_hd)
