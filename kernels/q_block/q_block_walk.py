"""Attention of a block of query rows over a range of one sequence's tokens, with matrix products.

The rows ``[BLOCK_M, head_size]`` share one KV head, so each tile of K and V is loaded once for all of them and both
products go to the matrix units. For a tile of tokens ``t``:

    S = scale · log2(e) · Q Kᵀ       P = exp2(S - max)       acc = acc · alpha + P V

in base 2, which is what the hardware's exponential is in: with log2(e) inside the scale, an element costs one product
less. P is rounded to q's dtype, as the matrix units want it, and the numbers of an 8-bit cache take it too, which holds
them exactly; sums stay in float32. See ``softmax_state`` for the rest.

Row ``m`` sees the tokens below its limit. Limits differ within a block, since queries that follow each other see one
token more each: tiles below the smallest limit need no mask, and as all but the last one or two are of that kind, they
have a loop of their own (``MASKED=False``) without comparisons. With a sliding window the first tiles are masked too:
of the tokens before the largest limit less the window, not every row sees all.

No multiplication is fused with an addition (``enable_fp_fusion=False``). In tiles without masks the compiler would
compute ``scale · (Q Kᵀ) - max`` in one step, without rounding the product as it was rounded for the maximum: that may
be above 0 by half a unit in the last place of the largest score, which from 2^31 on is more than exp2 can take.

With a soft cap or ALiBi the scores are made in natural units, as ``score_variants`` wants them, and log2(e) comes last.

Tiles step over tokens, not pages (see ``paged_walk``). If a page is a whole number of tiles, a tile lies in one page
and one look into the block table places it; otherwise each token looks for itself.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.matrix_units import as_operand
from attnfuzz.kernels.common.score_variants import vary_scores, window_begin


@triton.jit
def attend_tiles(
    row_max,  # [BLOCK_M], in base 2
    exp_sum,  # [BLOCK_M]
    acc,  # [BLOCK_M, BLOCK_DV]
    b_q,  # [BLOCK_M, BLOCK_D], in the input dtype
    limits,  # [BLOCK_M], how many tokens each row sees
    p_k, stride_kb, stride_kt, stride_kdo, stride_kx,  # at this KV head
    p_v, stride_vb, stride_vt, stride_vd,
    p_pages, stride_page,  # at this sequence's row of the block table
    begin, end,
    scale,  # times log2(e) unless there are soft_cap or slopes
    block_size,
    o_d, m_d,  # dimensions of q and K
    o_dv, m_dv,  # dimensions of V
    # variants: None unless asked for
    first_seen,  # the first token that any row sees, with a window
    window, soft_cap,
    slopes,  # [BLOCK_M, 1]
    MASKED: tl.constexpr,  # whether a tile may reach beyond ``end``, beyond a row's limit or before its window
    WHOLE_HEAD: tl.constexpr,  # whether BLOCK_D is head_size
    WHOLE_V: tl.constexpr,  # whether BLOCK_DV is v_head_size
    SAME_STRIDES: tl.constexpr,  # whether tokens of V are placed as those of K, and worth placing once
    X: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # block_size if that is to be compiled in, else 0
):  # fmt: skip
    """The state after the tokens ``[begin, end)``; ``begin`` is a multiple of TILE."""
    o_t = tl.arange(0, TILE)
    o_kd = (o_d // X) * stride_kdo + (o_d % X) * stride_kx
    o_vd = o_dv * stride_vd
    # The block ids of the next tile are loaded while this one is worked on. Were they loaded in the step that needs
    # them, the compiler would spend its pipeline stages on these loads, and one tile less would be on its way.
    i_block = _load_ids(p_pages, stride_page, begin, end, block_size, TILE, BLOCK_SIZE)
    for start in range(begin, end, TILE):
        i_next = _load_ids(p_pages, stride_page, start + TILE, end, block_size, TILE, BLOCK_SIZE)
        i_t = start + o_t
        m_t = i_t < end
        if window is not None:
            m_t = m_t & (i_t >= first_seen)
        if BLOCK_SIZE > 0 and BLOCK_SIZE % TILE == 0:
            i_off = (start % BLOCK_SIZE + o_t).to(tl.int64)
        elif BLOCK_SIZE > 0 and TILE % BLOCK_SIZE == 0:
            i_off = (o_t % BLOCK_SIZE).to(tl.int64)  # in each tile the same, so that it stands before the loop
        elif BLOCK_SIZE > 0:
            i_off = (i_t % BLOCK_SIZE).to(tl.int64)
        else:
            i_off = (i_t % block_size).to(tl.int64)
        o_kt = i_block.to(tl.int64) * stride_kb + i_off * stride_kt
        o_vt = o_kt if SAME_STRIDES else i_block.to(tl.int64) * stride_vb + i_off * stride_vt
        b_k = _load_tile(p_k + o_kt[:, None] + o_kd[None, :], m_t, m_d, MASKED, WHOLE_HEAD)  # [TILE, BLOCK_D]
        b_v = _load_tile(p_v + o_vt[:, None] + o_vd[None, :], m_t, m_dv, MASKED, WHOLE_V)  # [TILE, BLOCK_DV]

        b_s = tl.dot(b_q, tl.trans(as_operand(b_k, b_q.dtype)), input_precision="ieee") * scale  # [BLOCK_M, TILE]
        if soft_cap is not None or slopes is not None:
            i_row = limits[:, None] - 1  # the query's own position
            b_s = vary_scores(b_s, i_t[None, :], i_row, slopes, soft_cap)
            b_s = b_s * 1.4426950408889634
        if MASKED:
            m_s = i_t[None, :] < limits[:, None]
            if window is not None:
                m_s = m_s & (i_t[None, :] >= window_begin(limits - 1, window)[:, None])
            b_s = tl.where(m_s, b_s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, axis=1))
        # A row may have seen no token yet, or none but such as have a score of -inf.
        ref = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp2(row_max - ref)
        b_p = tl.exp2(b_s - ref[:, None])
        exp_sum = exp_sum * alpha + tl.sum(b_p, axis=1)
        acc = tl.dot(b_p.to(b_q.dtype), as_operand(b_v, b_q.dtype), acc * alpha[:, None], input_precision="ieee")
        row_max = new_max
        i_block = i_next
    return row_max, exp_sum, acc


@triton.jit
def _load_ids(p_pages, stride_page, start, end, block_size, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Block ids of a tile's tokens: one for all if a page is a whole number of tiles, else ``[TILE]``.

    Entries past the last page may be anything and are not read.
    """
    if BLOCK_SIZE > 0 and BLOCK_SIZE % TILE == 0:
        i_block = tl.load(p_pages + tl.cast(start // BLOCK_SIZE, tl.int64) * stride_page, mask=start < end, other=0)
    else:
        i_t = start + tl.arange(0, TILE)
        i_page = i_t // BLOCK_SIZE if BLOCK_SIZE > 0 else i_t // block_size
        i_block = tl.load(p_pages + i_page.to(tl.int64) * stride_page, mask=i_t < end, other=0)
    return i_block


@triton.jit
def _load_tile(pointers, m_t, m_d, MASKED: tl.constexpr, WHOLE_HEAD: tl.constexpr):
    """A tile of K or V. Dead rows of a page may hold NaN: they are not read, since 0 · NaN is not 0."""
    if MASKED:
        tile = tl.load(pointers, mask=m_t[:, None] & m_d[None, :], other=0.0)
    elif WHOLE_HEAD:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=m_d[None, :], other=0.0)
    return tile
