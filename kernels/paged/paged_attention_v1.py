"""PagedAttention v1: one query token per sequence over a packed paged cache, in one launch.

A program takes one query head of one sequence and all tokens of it, in the three passes of ``paged_attention_walk``.
With few long sequences most of a GPU idles, which is what v2 is for: ``paged_attention_v2``.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.score_variants import count_sink
from attnfuzz.kernels.paged.paged_attention_walk import attend_packed


# As in dense_decode: no specialisation on what only places a base pointer or divides an index.
@triton.jit(
    do_not_specialize=[
        "group_size", "stride_qs", "stride_qh", "stride_kb", "stride_kt", "stride_kh", "stride_kdo",
        "stride_table_s", "stride_len", "stride_logit_s", "stride_logit_h", "stride_os", "stride_oh",
        "stride_lse_s", "stride_lse_h", "window", "stride_slope", "stride_sink",
        "stride_k_scale", "stride_v_scale",
    ]
)  # fmt: skip
def paged_attention_v1_kernel(
    # tensors, each followed by its strides in elements
    p_q, stride_qs, stride_qh, stride_qd,  # [num_seqs, num_q_heads, head_size]
    # [num_blocks, num_kv_heads, head_size / X, block_size, X]; all strides but the last in units of ALIGN elements
    p_k, stride_kb, stride_kt, stride_kh, stride_kdo, stride_kx,
    p_v, stride_vb, stride_vt, stride_vh, stride_vd,  # [num_blocks, num_kv_heads, v_head_size, block_size]
    p_table, stride_table_s, stride_page,  # [num_seqs, max_blocks_per_seq]
    p_seq_lens, stride_len,  # [num_seqs]
    # [num_seqs, num_q_heads, max_blocks_per_seq * block_size], room for scores, whose last axis is contiguous
    p_logits, stride_logit_s, stride_logit_h,
    p_out, stride_os, stride_oh, stride_od,  # [num_seqs, num_q_heads, v_head_size]
    p_lse, stride_lse_s, stride_lse_h,  # [num_seqs, num_q_heads]
    # scalars
    scale,
    block_size,  # tokens per page
    group_size,  # query heads per KV head
    head_size, v_head_size,
    # variants (see the wrapper): None unless asked for
    window, soft_cap,
    p_slopes, stride_slope,  # [num_q_heads]
    p_sinks, stride_sink,  # [num_q_heads]
    p_k_scale, stride_k_scale,  # [1] or [num_kv_heads], of an 8-bit cache
    p_v_scale, stride_v_scale,
    # constants
    ALIGN: tl.constexpr,  # elements, a divisor of K's strides but the last
    X: tl.constexpr,  # innermost K elements, a divisor of head_size
    TILE: tl.constexpr,  # keys per step, a power of two, whatever the page size
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
    BLOCK_DV: tl.constexpr,  # v_head_size likewise
):  # fmt: skip
    """Grid ``(num_seqs, num_q_heads)``."""
    i_seq = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    i_kv_head = i_head // group_size
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    o_dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    m_d = o_d // X < head_size // X
    m_dv = o_dv < v_head_size

    p_q += i_seq * stride_qs + i_head * stride_qh
    seq_len = tl.load(p_seq_lens + i_seq * stride_len).to(tl.int32)
    b_q = tl.load(p_q + o_d * stride_qd, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK_D]
    slope = tl.load(p_slopes + i_head * stride_slope) if p_slopes is not None else None
    if p_k_scale is not None:
        scale *= tl.load(p_k_scale + i_kv_head * stride_k_scale)
    qk_max, exp_sum, b_out = attend_packed(
        b_q, p_k + i_kv_head * stride_kh * ALIGN, stride_kb, stride_kt, stride_kdo, stride_kx,
        p_v + i_kv_head * stride_vh, stride_vb, stride_vt, stride_vd, p_table + i_seq * stride_table_s, stride_page,
        p_logits + i_seq * stride_logit_s + i_head * stride_logit_h, 0, seq_len, scale, block_size,
        o_d, m_d, o_dv, m_dv, seq_len - 1, window, soft_cap, slope, ALIGN, X, TILE, BLOCK_DV,
    )  # fmt: skip
    if p_k_scale is not None:
        b_out *= tl.load(p_v_scale + i_kv_head * stride_v_scale)
    if p_sinks is not None:
        # The output is normalised: what the sink leaves of it is the share of the keys in the new sum.
        sink = tl.load(p_sinks + i_head * stride_sink)
        of_keys = exp_sum
        qk_max, exp_sum, alpha = count_sink(qk_max, exp_sum, sink, False)
        b_out = b_out * (of_keys * alpha / tl.where(exp_sum == 0.0, 1.0, exp_sum))

    p_out += i_seq * stride_os + i_head * stride_oh
    tl.store(p_out + o_dv * stride_od, b_out.to(p_out.dtype.element_ty), mask=m_dv)  # [BLOCK_DV]
    # Without tokens qk_max is -inf, and so is the sum, whatever the logarithm of 1 is.
    lse = qk_max + tl.log(tl.where(exp_sum == 0.0, 1.0, exp_sum))
    tl.store(p_lse + i_seq * stride_lse_s + i_head * stride_lse_h, lse)
