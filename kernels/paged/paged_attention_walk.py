"""The three passes of PagedAttention over a range of one sequence's tokens, for one query head.

    1. s_i = scale · q · k_i for all tokens, kept in a buffer ("logits"), and qk_max = max s_i
    2. exp_sum = Σ exp(s_i - qk_max)
    3. out = Σ (exp(s_i - qk_max) / exp_sum) · v_i

So does the first kernel on a paged cache (Kwon et al., arXiv 2309.06180; vLLM's ``attention_kernels.cu``): the softmax
is not online, nothing is ever rescaled, and each sum is kept in as many parts as there are lanes, added up once at the
end. The CUDA kernel holds its logits in shared memory, which limits the length. Triton cannot index that, so they go
through a buffer in global memory: 4 bytes for each token beside the 4 · head_size of K and V in float16. One thread
writes a logit and others read it, so a barrier separates the first pass from the second.

vLLM divides by ``exp_sum + 1e-6``. As qk_max is one of the scores, exp_sum is at least 1: the constant shrinks an
output by up to 1e-6 of itself, 17 times the rounding of float32, and is there for ranges without tokens only, where it
makes 0 · 1e6 of 0 / 0. Those are told apart here, so nothing is added.

The layout is the packed one: K as ``[num_blocks, num_kv_heads, head_size / X, block_size, X]`` with X elements in 16
bytes, V as ``[num_blocks, num_kv_heads, v_head_size, block_size]``. Of K a thread reads X elements of a token at once;
that they begin at a multiple of 16 bytes the compiler knows because strides come divided by ``ALIGN`` (as in
``merge_states_wide``) and ``head_size`` is compared in units of X. Of V neighbouring tokens lie side by side: a thread
reads as many of a page as are 16 bytes, where the page size and the first token are multiples of 16 (without a window).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.score_variants import vary_scores, window_begin


@triton.jit
def _pages_of(p_pages, i_t, m_t, block_size, stride_page):
    """Page and offset of each token, in int64 before they meet a stride. Where ``m_t`` is false, any page."""
    i_page = (i_t // block_size).to(tl.int64)
    i_block = tl.load(p_pages + i_page * stride_page, mask=m_t).to(tl.int64)  # [TILE]
    return i_block, (i_t % block_size).to(tl.int64)


@triton.jit
def _weights_and_values(
    p_logits, p_v, stride_vb, stride_vt, p_pages, stride_page, start, end, ref, inv_sum, block_size, o_vd, m_dv,
    MASKED: tl.constexpr,  # whether the tile may reach beyond ``end``
    TILE: tl.constexpr,
):  # fmt: skip
    """Weights and values of a tile of tokens, in float32: ``[TILE]`` and ``[TILE, BLOCK_DV]``.

    Without a mask over tokens the compiler may load as many at once as lie side by side in a page.
    """
    i_t = start + tl.arange(0, TILE)
    if MASKED:
        m_t = i_t < end
        b_s = tl.load(p_logits + i_t, mask=m_t, other=float("-inf"))  # [TILE]
        i_block, i_off = _pages_of(p_pages, i_t, m_t, block_size, stride_page)
        p_tile = p_v + (i_block * stride_vb + i_off * stride_vt)[:, None] + o_vd[None, :]
        # Dead rows of a page may hold NaN: they are not read, since 0 · NaN is not 0.
        b_v = tl.load(p_tile, mask=m_t[:, None] & m_dv[None, :], other=0.0)  # [TILE, BLOCK_DV]
    else:
        b_s = tl.load(p_logits + i_t)  # [TILE]
        i_block, i_off = _pages_of(p_pages, i_t, None, block_size, stride_page)
        p_tile = p_v + (i_block * stride_vb + i_off * stride_vt)[:, None] + o_vd[None, :]
        b_v = tl.load(p_tile, mask=m_dv[None, :], other=0.0)  # [TILE, BLOCK_DV]
    return tl.exp(b_s - ref) * inv_sum, b_v.to(tl.float32)


@triton.jit
def attend_packed(
    b_q,  # [BLOCK_D], float32
    p_k, stride_kb, stride_kt, stride_kdo, stride_kx,  # at this KV head; all but kx in units of ALIGN elements
    p_v, stride_vb, stride_vt, stride_vd,
    p_pages, stride_page,  # at this sequence's row of the block table
    p_logits,  # at the first of this head's [max_num_tokens] logits
    begin, end,
    scale, block_size,
    o_d, m_d,  # dimensions of q and K
    o_dv, m_dv,  # dimensions of V
    i_query,  # position of the query: the last token that it sees
    window, soft_cap, slope,  # None unless asked for
    ALIGN: tl.constexpr,
    X: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """``qk_max``, ``exp_sum`` and ``out [BLOCK_DV]`` over tokens ``[begin, end)``: -inf, 0 and 0 if there are none."""
    if window is not None:
        begin = tl.maximum(begin, window_begin(i_query, window))
    o_t = tl.arange(0, TILE)
    o_kd = (o_d // X) * stride_kdo * ALIGN + (o_d % X) * stride_kx
    o_vd = o_dv * stride_vd

    b_max = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(begin, end, TILE):  # pass 1: scores
        i_t = start + o_t
        m_t = i_t < end
        i_block, i_off = _pages_of(p_pages, i_t, m_t, block_size, stride_page)
        p_tile = p_k + ((i_block * stride_kb + i_off * stride_kt) * ALIGN)[:, None] + o_kd[None, :]
        b_k = tl.load(p_tile, mask=m_t[:, None] & m_d[None, :], other=0.0)  # [TILE, BLOCK_D]
        b_s = tl.sum(b_q[None, :] * b_k.to(tl.float32), axis=1) * scale  # [TILE]
        b_s = vary_scores(b_s, i_t, i_query, slope, soft_cap)
        tl.store(p_logits + i_t, b_s, mask=m_t)  # [TILE]
        b_max = tl.maximum(b_max, tl.where(m_t, b_s, float("-inf")))
    qk_max = tl.max(b_max, axis=0)
    ref = tl.where(qk_max == float("-inf"), 0.0, qk_max)
    tl.debug_barrier()

    b_sum = tl.zeros([TILE], tl.float32)
    for start in range(begin, end, TILE):  # pass 2: their sum
        i_t = start + o_t
        b_s = tl.load(p_logits + i_t, mask=i_t < end, other=float("-inf"))  # [TILE]
        b_sum += tl.exp(b_s - ref)
    exp_sum = tl.sum(b_sum, axis=0)
    inv_sum = 1.0 / tl.where(exp_sum == 0.0, 1.0, exp_sum)

    b_acc = tl.zeros([TILE, BLOCK_DV], tl.float32)
    whole_end = begin + tl.maximum(end - begin, 0) // TILE * TILE
    for start in range(begin, whole_end, TILE):  # pass 3: values, of whole tiles
        b_p, b_v = _weights_and_values(
            p_logits, p_v, stride_vb, stride_vt, p_pages, stride_page, start, end, ref, inv_sum, block_size, o_vd, m_dv,
            False, TILE,
        )  # fmt: skip
        b_acc += b_p[:, None] * b_v
    for start in range(whole_end, end, TILE):  # pass 3: values, of the rest
        b_p, b_v = _weights_and_values(
            p_logits, p_v, stride_vb, stride_vt, p_pages, stride_page, start, end, ref, inv_sum, block_size, o_vd, m_dv,
            True, TILE,
        )  # fmt: skip
        b_acc += b_p[:, None] * b_v
    return qk_max, exp_sum, tl.sum(b_acc, axis=0)
