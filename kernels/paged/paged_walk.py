"""Attention of one query head over a range of one sequence's tokens, with K and V found through the block table.

Token ``t`` lies in page ``block_table[t // block_size]`` at offset ``t % block_size``. Tiles step over tokens, not
pages, so a tile may cover part of a page or several, and the page size need not be a power of two (arXiv 2511.11581,
§4.6).

All layouts differ only in strides:

    K: block·stride_kb + offset·stride_kt + head·stride_kh + (d // X)·stride_kdo + (d % X)·stride_kx
    V: block·stride_vb + offset·stride_vt + head·stride_vh + d·stride_vd

The packed layout (vLLM's first paged attention kernel) stores K as ``[num_blocks, num_kv_heads, head_size / X,
block_size, X]`` with X elements in 16 bytes, so that threads on neighbouring tokens read neighbouring 16 bytes. The
other layouts have X = 1.

Heads of V may have another size than those of q and K, as in multi-head latent attention (DeepSeek-V2, arXiv
2405.04434), so each has dimensions ``o_d`` and ``o_dv`` of its own.

With a sliding window the walk begins at the first token that the query sees. For it and other variants see
``score_variants``.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.score_variants import vary_scores, window_begin


@triton.jit
def attend_pages(
    b_q,  # [BLOCK_D], float32
    p_k, stride_kb, stride_kt, stride_kdo, stride_kx,  # at this sequence's KV head
    p_v, stride_vb, stride_vt, stride_vd,
    p_pages, stride_page,  # at this sequence's row of the block table
    begin, end,
    scale, block_size,
    o_d, m_d,  # dimensions of q and K
    o_dv, m_dv,  # dimensions of V
    i_query,  # position of the query: the last token that it sees
    window, soft_cap, slope,  # None unless asked for
    X: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """State ``(row_max, exp_sum, acc)`` over tokens ``[begin, end)``; the empty state if there are none."""
    if window is not None:
        begin = tl.maximum(begin, window_begin(i_query, window))
    o_t = tl.arange(0, TILE)
    o_kd = (o_d // X) * stride_kdo + (o_d % X) * stride_kx
    o_vd = o_dv * stride_vd

    row_max = tl.full([], float("-inf"), tl.float32)
    exp_sum = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(begin, end, TILE):
        i_t = start + o_t
        m_t = i_t < end
        m_td = m_t[:, None] & m_d[None, :]
        m_tdv = m_t[:, None] & m_dv[None, :]
        # Entries past the last page may be anything and are not read. Ids are int64 before they meet a stride.
        i_page = (i_t // block_size).to(tl.int64)
        i_off = (i_t % block_size).to(tl.int64)
        i_block = tl.load(p_pages + i_page * stride_page, mask=m_t, other=0).to(tl.int64)  # [TILE]
        o_kt = i_block * stride_kb + i_off * stride_kt
        o_vt = i_block * stride_vb + i_off * stride_vt
        # Dead rows of a page may hold NaN: they are not read either, since 0 · NaN is not 0.
        b_k = tl.load(p_k + o_kt[:, None] + o_kd[None, :], mask=m_td, other=0.0)  # [TILE, BLOCK_D]
        b_v = tl.load(p_v + o_vt[:, None] + o_vd[None, :], mask=m_tdv, other=0.0)  # [TILE, BLOCK_DV]

        b_s = tl.sum(b_q[None, :] * b_k.to(tl.float32), axis=1) * scale  # [TILE]
        b_s = vary_scores(b_s, i_t, i_query, slope, soft_cap)
        b_s = tl.where(m_t, b_s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, axis=0))
        ref = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp(row_max - ref)
        b_p = tl.exp(b_s - ref)  # [TILE]
        exp_sum = exp_sum * alpha + tl.sum(b_p, axis=0)
        acc = acc * alpha + tl.sum(b_p[:, None] * b_v.to(tl.float32), axis=0)
        row_max = new_max
    return row_max, exp_sum, acc
