"""The states that ``q_block`` leaves for the segments of each row, combined into the row's result.

With the maximum ``m_s``, the sum ``l_s`` and the unnormalised output ``acc_s`` of segment s (arXiv 2511.11581, §4.5):

    m = max m_s      w_s = exp2(m_s - m)      out = Σ w_s acc_s / Σ w_s l_s      lse = (m + log2 Σ w_s l_s) · ln 2

Maxima are in base 2, as ``q_block_walk`` keeps them. A segment without tokens has m_s = -inf and l_s = 0; its acc_s was
never written and is not read. Where all are empty, ``ref`` is 0 in place of m, every weight is 0, and so is the output.

Segments are read a chunk at a time, as many as registers hold, and the chunks are carried over as an online softmax
carries tiles over.

Attention sinks are added here, once for each row (``score_variants``).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.score_variants import count_sink


@triton.jit(
    do_not_specialize=[
        "num_seqs", "num_segments", "stride_cu", "stride_ms", "stride_mh", "stride_msegment", "stride_lse_s",
        "stride_lse_h", "stride_sink",
    ]
)  # fmt: skip
def reduce_segments_kernel(
    # tensors, each followed by its strides in elements
    p_acc, stride_as, stride_ah, stride_asegment, stride_ad,  # [num_tokens, num_q_heads, num_segments, v_head_size]
    p_row_max, p_exp_sum, stride_ms, stride_mh, stride_msegment,  # [num_tokens, num_q_heads, num_segments]
    p_cu_seqlens, stride_cu,  # [num_seqs + 1]
    p_out, stride_os, stride_oh, stride_od,  # [num_tokens, num_q_heads, v_head_size]
    p_lse, stride_lse_s, stride_lse_h,  # [num_tokens, num_q_heads]
    p_sinks, stride_sink,  # [num_q_heads], None unless asked for
    # scalars
    num_seqs, num_segments, v_head_size,
    # constants
    CHUNK: tl.constexpr,  # segments per step, a power of two
    BLOCK_DV: tl.constexpr,  # v_head_size rounded up to a power of two
):  # fmt: skip
    """Grid ``(num_tokens, num_q_heads)``."""
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    # A captured graph may have room for more tokens than the batch has.
    if i_token < tl.load(p_cu_seqlens + tl.cast(num_seqs, tl.int64) * stride_cu):
        o_segment = tl.arange(0, CHUNK).to(tl.int64)
        o_d = tl.arange(0, BLOCK_DV).to(tl.int64)
        m_d = o_d < v_head_size
        p_row = p_acc + i_token * stride_as + i_head * stride_ah
        row_max = tl.full([], float("-inf"), tl.float32)
        exp_sum = tl.full([], 0.0, tl.float32)
        acc = tl.zeros([BLOCK_DV], tl.float32)
        for start in range(0, num_segments, CHUNK):
            i_segment = start + o_segment
            m_segment = i_segment < num_segments
            o_state = i_token * stride_ms + i_head * stride_mh + i_segment * stride_msegment
            b_max = tl.load(p_row_max + o_state, mask=m_segment, other=float("-inf"))  # [CHUNK]
            b_sum = tl.load(p_exp_sum + o_state, mask=m_segment, other=0.0)  # [CHUNK]
            m_acc = (b_max > float("-inf"))[:, None] & m_d[None, :]
            o_acc = (i_segment * stride_asegment)[:, None] + (o_d * stride_ad)[None, :]
            b_acc = tl.load(p_row + o_acc, mask=m_acc, other=0.0)  # [CHUNK, BLOCK_DV]

            new_max = tl.maximum(row_max, tl.max(b_max, axis=0))
            ref = tl.where(new_max == float("-inf"), 0.0, new_max)
            alpha = tl.exp2(row_max - ref)
            b_w = tl.exp2(b_max - ref)  # [CHUNK]
            exp_sum = exp_sum * alpha + tl.sum(b_w * b_sum, axis=0)
            acc = acc * alpha + tl.sum(b_w[:, None] * b_acc, axis=0)
            row_max = new_max

        if p_sinks is not None:
            sink = tl.load(p_sinks + i_head * stride_sink) * 1.4426950408889634
            row_max, exp_sum, alpha = count_sink(row_max, exp_sum, sink, True)
            acc = acc * alpha
        divisor = tl.where(exp_sum == 0.0, 1.0, exp_sum)
        b_out = acc / divisor

        o_out = i_token * stride_os + i_head * stride_oh + o_d * stride_od
        tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_d)
        o_lse = i_token * stride_lse_s + i_head * stride_lse_h
        tl.store(p_lse + o_lse, (row_max + tl.log2(divisor)) * 0.6931471805599453)
