"""Attention of several query tokens per sequence under a mask: trees of drafts, no mask at all, some pages of a cache.

The mask is a table of yes and no for each sequence, as FlashInfer's ``custom_mask`` and SGLang's verification of draft
trees (SpecInfer, arXiv 2305.09781) have it: with n query tokens and length L, ``mask[mask_indptr[s] + j L + t]`` says
whether the j-th query token of sequence s sees its key t. Rows are as long as the sequence, not as the batch's longest
one, and nothing is taken for granted: not that a token sees itself, nor that it sees anything.

One program per (query token, query head), as in ``paged.paged_attention``, with the walk of ``paged.paged_walk`` but
for two things: a key takes part where the token's row of the mask says so, and a tile that has none is not loaded,
which is what makes attention to a few pages cheap.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.score_variants import add_sink, cap_scores
from attnfuzz.kernels.common.softmax_state import store_state
from attnfuzz.kernels.paged.paged_attention import sequence_of_token


# As in dense_decode: no specialisation on what only places a base pointer or divides an index.
@triton.jit(
    do_not_specialize=[
        "num_seqs", "group_size", "block_size", "stride_qn", "stride_qh", "stride_table_s", "stride_len", "stride_cu",
        "stride_indptr", "stride_on", "stride_oh", "stride_lse_n", "stride_lse_h", "stride_sink", "stride_k_scale",
        "stride_v_scale",
    ]
)  # fmt: skip
def masked_attention_kernel(
    # tensors, each followed by its strides in elements
    p_q, stride_qn, stride_qh, stride_qd,  # [num_tokens, num_q_heads, head_size]
    p_k, stride_kb, stride_kt, stride_kh, stride_kdo, stride_kx,  # see paged_walk
    p_v, stride_vb, stride_vt, stride_vh, stride_vd,
    p_table, stride_table_s, stride_page,  # [num_seqs, max_blocks_per_seq]
    p_seq_lens, stride_len,  # [num_seqs]
    p_cu_seqlens, stride_cu,  # [num_seqs + 1]
    p_mask, stride_mask,  # [mask_size]
    p_mask_indptr, stride_indptr,  # [num_seqs + 1]
    p_out, stride_on, stride_oh, stride_od,  # [num_tokens, num_q_heads, v_head_size]
    p_lse, stride_lse_n, stride_lse_h,  # [num_tokens, num_q_heads]
    # scalars
    scale, num_seqs,
    block_size,  # tokens per page
    group_size,  # query heads per KV head
    head_size, v_head_size,
    # variants (see the wrapper): None unless asked for
    soft_cap,
    p_sinks, stride_sink,  # [num_q_heads]
    p_k_scale, stride_k_scale,  # [1] or [num_kv_heads], of an 8-bit cache
    p_v_scale, stride_v_scale,
    # constants
    X: tl.constexpr,  # innermost K elements of the packed layout, otherwise 1
    TILE: tl.constexpr,  # keys per step, a power of two, whatever the page size
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
    BLOCK_DV: tl.constexpr,  # v_head_size likewise
):  # fmt: skip
    """Grid ``(num_tokens, num_q_heads)``."""
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    i_kv_head = i_head // group_size
    o_t = tl.arange(0, TILE)
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    o_dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    m_d = o_d < head_size
    m_dv = o_dv < v_head_size
    o_kd = (o_d // X) * stride_kdo + (o_d % X) * stride_kx
    o_vd = o_dv * stride_vd

    # q may have more rows than the batch has tokens, as under a captured graph: those come out as empty.
    i_found = sequence_of_token(p_cu_seqlens, stride_cu, num_seqs, i_token)
    m_found = i_found < num_seqs
    i_seq = i_found.to(tl.int64)
    seq_len = tl.load(p_seq_lens + i_seq * stride_len, mask=m_found, other=0).to(tl.int32)
    query_begin = tl.load(p_cu_seqlens + i_seq * stride_cu, mask=m_found, other=0).to(tl.int64)
    # All tables of a batch together may have more than 2^31 entries.
    mask_begin = tl.load(p_mask_indptr + i_seq * stride_indptr, mask=m_found, other=0).to(tl.int64)
    i_row = mask_begin + (i_token - query_begin) * seq_len

    p_q += i_token * stride_qn + i_head * stride_qh
    p_k += i_kv_head * stride_kh
    p_v += i_kv_head * stride_vh
    p_table += i_seq * stride_table_s
    p_mask += i_row * stride_mask
    b_q = tl.load(p_q + o_d * stride_qd, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK_D]
    if p_k_scale is not None:
        scale *= tl.load(p_k_scale + i_kv_head * stride_k_scale)

    row_max = tl.full([], float("-inf"), tl.float32)
    exp_sum = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, seq_len, TILE):
        i_t = start + o_t
        m_t = i_t < seq_len
        m_seen = tl.load(p_mask + i_t.to(tl.int64) * stride_mask, mask=m_t, other=0) != 0  # [TILE]
        if tl.max(m_seen.to(tl.int32), axis=0) > 0:
            m_td = m_seen[:, None] & m_d[None, :]
            m_tdv = m_seen[:, None] & m_dv[None, :]
            # Ids are int64 before they meet a stride.
            i_page = (i_t // block_size).to(tl.int64)
            i_off = (i_t % block_size).to(tl.int64)
            i_block = tl.load(p_table + i_page * stride_page, mask=m_seen, other=0).to(tl.int64)  # [TILE]
            o_kt = i_block * stride_kb + i_off * stride_kt
            o_vt = i_block * stride_vb + i_off * stride_vt
            b_k = tl.load(p_k + o_kt[:, None] + o_kd[None, :], mask=m_td, other=0.0)  # [TILE, BLOCK_D]
            b_v = tl.load(p_v + o_vt[:, None] + o_vd[None, :], mask=m_tdv, other=0.0)  # [TILE, BLOCK_DV]

            b_s = tl.sum(b_q[None, :] * b_k.to(tl.float32), axis=1) * scale  # [TILE]
            if soft_cap is not None:
                b_s = cap_scores(b_s, soft_cap)
            b_s = tl.where(m_seen, b_s, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(b_s, axis=0))
            ref = tl.where(new_max == float("-inf"), 0.0, new_max)
            alpha = tl.exp(row_max - ref)
            b_p = tl.exp(b_s - ref)  # [TILE]
            exp_sum = exp_sum * alpha + tl.sum(b_p, axis=0)
            acc = acc * alpha + tl.sum(b_p[:, None] * b_v.to(tl.float32), axis=0)
            row_max = new_max
    if p_k_scale is not None:
        acc *= tl.load(p_v_scale + i_kv_head * stride_v_scale)

    if p_sinks is not None:
        sink = tl.load(p_sinks + i_head * stride_sink)
        row_max, exp_sum, acc = add_sink(row_max, exp_sum, acc, sink)

    p_out += i_token * stride_on + i_head * stride_oh
    p_lse += i_token * stride_lse_n + i_head * stride_lse_h
    store_state(p_out, p_lse, o_dv, m_dv, stride_od, row_max, exp_sum, acc)
