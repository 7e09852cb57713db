"""Multi-head latent attention: decode on a cache whose rows are keys, and in their first numbers values.

One row of the cache is a token's latent vector, ``rank`` numbers, and the part of its key that turns with the position
(RoPE), ``rope_size`` numbers (DeepSeek-V2, arXiv 2405.04434). All query heads attend to this one KV head:

    s = scale · (q[:rank] · latent + q[rank:] · rope)        out = Σ softmax(s) · latent

So a tile of latent vectors is loaded once and multiplied twice, with the queries and with the weights. That is what
makes decode of latent attention cheap: of 576 numbers of a row 512 are used twice, by up to 128 query heads.

All query heads share one KV head, so there are few programs unless several share a sequence. They do so as those of
``grouped_decode`` do, by turns or by length, and ``combine_partials`` combines what they leave.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.score_variants import cap_scores
from attnfuzz.kernels.grouped.combine_partials import count_splits, find_split, share_splits


# As in dense_decode: no specialisation on what only places a base pointer or divides an index.
@triton.jit(
    do_not_specialize=[
        "num_seqs", "num_splits", "num_q_heads", "block_size", "stride_table_s", "stride_len", "stride_lse_s",
        "stride_lse_h",
    ]
)  # fmt: skip
def latent_decode_kernel(
    # tensors, each followed by its strides in elements
    p_q, stride_qs, stride_qh, stride_qd,  # [num_seqs, num_q_heads, rank + rope_size]
    p_cache, stride_cb, stride_ct, stride_cd,  # [num_blocks, block_size, rank + rope_size]
    p_table, stride_table_s, stride_page,  # [num_seqs, max_blocks_per_seq]
    p_seq_lens, stride_len,  # [num_seqs]
    p_out, stride_os, stride_oh, stride_od,  # [num_seqs, num_q_heads, rank]
    p_lse, stride_lse_s, stride_lse_h,  # [num_seqs, num_q_heads]
    # to be combined, as in grouped_decode
    p_partial_acc,  # [num_seqs, num_q_heads, num_splits, rank], without num_seqs if splits are shared out
    p_partial_max, p_partial_sum,  # without rank
    p_shares,  # [num_seqs, 2], int32: a sequence's first split and how many it has; not used unless BLOCK_S
    # scalars
    scale,
    soft_cap,  # None unless asked for
    num_seqs, num_splits, num_q_heads,
    block_size,  # tokens per page
    rank, rope_size,
    # constants
    TILE: tl.constexpr,  # tokens per step, a power of two, whatever the page size
    BLOCK_M: tl.constexpr,  # query heads of a program: a power of two of at least 16, for tl.dot
    BLOCK_R: tl.constexpr,  # rank rounded up to a power of two of at least 16
    BLOCK_P: tl.constexpr,  # rope_size likewise
    HAS_ROPE: tl.constexpr,
    WHOLE_TILES: tl.constexpr,  # whether TILE divides block_size
    BLOCK_S: tl.constexpr,  # num_seqs rounded up to a power of two where splits are shared out, otherwise 0
    PDL: tl.constexpr,  # whether launched with programmatic dependent launch
):  # fmt: skip
    """Grid ``num_seqs * cdiv(num_q_heads, BLOCK_M), num_splits``, without ``num_seqs`` if splits are shared out.

    So neighbours read the same rows.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    head_blocks = tl.cdiv(num_q_heads, BLOCK_M)
    i_split = tl.program_id(1)
    i_seq = tl.program_id(0) // head_blocks
    i_head_block = tl.program_id(0) - i_seq * head_blocks
    first_split = 0  # of the sequence, among those of a head that lie in memory
    splits_of_head = num_splits
    if BLOCK_S > 0:
        splits = share_splits(p_seq_lens, stride_len, num_seqs, num_splits, None, TILE, BLOCK_S)
        i_seq, first_split, end = find_split(splits, i_split)
        if i_seq >= num_seqs:
            return
        num_splits = end - first_split
        i_split -= first_split
        # For the second kernel, by one of the programs that know it.
        if (i_split == 0) & (i_head_block == 0):
            tl.store(p_shares + i_seq.to(tl.int64) * 2, first_split)
            tl.store(p_shares + i_seq.to(tl.int64) * 2 + 1, num_splits)
    i_seq = i_seq.to(tl.int64)
    i_head = i_head_block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_head = i_head < num_q_heads
    o_t = tl.arange(0, TILE)
    o_r = tl.arange(0, BLOCK_R).to(tl.int64)
    m_r = o_r < rank
    o_p = tl.arange(0, BLOCK_P).to(tl.int64)
    m_p = o_p < rope_size
    seq_len = tl.load(p_seq_lens + i_seq * stride_len).to(tl.int32)
    splits_used = tl.maximum(count_splits(seq_len, 0, num_splits, TILE), 1)
    if i_split >= splits_used:
        return

    p_heads = p_q + i_seq * stride_qs + i_head[:, None] * stride_qh
    m_hr = m_head[:, None] & m_r[None, :]
    b_q = tl.load(p_heads + o_r[None, :] * stride_qd, mask=m_hr, other=0.0)  # [BLOCK_M, BLOCK_R]
    if HAS_ROPE:
        m_hp = m_head[:, None] & m_p[None, :]
        b_q_rope = tl.load(p_heads + (rank + o_p)[None, :] * stride_qd, mask=m_hp, other=0.0)  # [BLOCK_M, BLOCK_P]

    p_pages = p_table + i_seq * stride_table_s
    step = num_splits * TILE
    # Of all tokens of a tile, or of the first where a page holds whole tiles. Entries past the last page may be
    # anything and are not read. Ids are int64 before they meet a stride.
    o_id = 0 if WHOLE_TILES else o_t
    i_t = i_split * TILE + o_id
    i_page = (i_t // block_size).to(tl.int64)
    i_off = i_t - i_t // block_size * block_size
    i_block = tl.load(p_pages + i_page * stride_page, mask=i_t < seq_len, other=0)  # [TILE]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for start in range(i_split * TILE, seq_len, step):
        m_t = start + o_t < seq_len
        p_page = p_cache + i_block.to(tl.int64) * stride_cb + i_off.to(tl.int64) * stride_ct
        p_rows = (p_page + o_t.to(tl.int64) * stride_ct if WHOLE_TILES else p_page)[:, None]
        # Dead rows of a page may hold NaN: they are not read, since 0 · NaN is not 0.
        m_tr = m_t[:, None] & m_r[None, :]
        b_latent = tl.load(p_rows + o_r[None, :] * stride_cd, mask=m_tr, other=0.0)  # [TILE, BLOCK_R]
        if HAS_ROPE:
            m_tp = m_t[:, None] & m_p[None, :]
            b_rope = tl.load(p_rows + (rank + o_p)[None, :] * stride_cd, mask=m_tp, other=0.0)  # [TILE, BLOCK_P]
        # Page ids of the next tile are on their way meanwhile, as in grouped_decode.
        i_t = start + step + o_id
        i_page = (i_t // block_size).to(tl.int64)
        i_off = i_t - i_t // block_size * block_size
        i_block = tl.load(p_pages + i_page * stride_page, mask=i_t < seq_len, other=0)  # [TILE]

        b_s = tl.dot(b_q, tl.trans(b_latent))  # [BLOCK_M, TILE]
        if HAS_ROPE:
            b_s = tl.dot(b_q_rope, tl.trans(b_rope), b_s)
        b_s *= scale
        if soft_cap is not None:
            b_s = cap_scores(b_s, soft_cap)
        b_s = tl.where(m_t[None, :], b_s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, axis=1))
        ref = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp(row_max - ref)
        b_w = tl.exp(b_s - ref[:, None])  # [BLOCK_M, TILE]
        exp_sum = exp_sum * alpha + tl.sum(b_w, axis=1)
        acc = tl.dot(b_w.to(b_latent.dtype), b_latent, acc * alpha[:, None])
        row_max = new_max

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if splits_used == 1:
        divisor = tl.where(exp_sum == 0.0, 1.0, exp_sum)
        b_out = acc / divisor[:, None]  # [BLOCK_M, BLOCK_R]
        o_out = i_seq * stride_os + i_head[:, None] * stride_oh + o_r[None, :] * stride_od
        tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_hr)
        tl.store(p_lse + i_seq * stride_lse_s + i_head * stride_lse_h, row_max + tl.log(divisor), mask=m_head)
        return

    i_row = i_head if BLOCK_S > 0 else i_seq * num_q_heads + i_head
    o_state = i_row * splits_of_head + first_split + i_split  # [BLOCK_M]
    tl.store(p_partial_acc + o_state[:, None] * rank + o_r[None, :], acc, mask=m_hr)
    tl.store(p_partial_max + o_state, row_max, mask=m_head)
    tl.store(p_partial_sum + o_state, exp_sum, mask=m_head)
