"""Split-K decode attention, second stage: one head's partial states become its result.

    lse = log Σ_s exp(lse_s)        out = Σ_s exp(lse_s - lse) · out_s

This is attention once more, over splits instead of tokens, with scores ``lse_s`` and values ``out_s``: the same online
softmax, whose guard for scores of -inf makes empty splits come out right, and rows of nothing but empty splits.
Dividing by the sum of the weights, rather than using a rounded ``lse`` in their exponents, keeps a large ``lse``
(1e4 has a float32 rounding error of 5e-4) from scaling the whole output.

Splits are read a chunk at a time, so their number is not limited by registers. Attention sinks are added here, once
for each row (``score_variants``).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.score_variants import add_sink
from attnfuzz.kernels.common.softmax_state import store_state


@triton.jit(
    do_not_specialize=[
        "num_splits", "stride_ps", "stride_ph", "stride_psplit", "stride_plse_s", "stride_plse_h", "stride_plse_split",
        "stride_os", "stride_oh", "stride_lse_s", "stride_lse_h", "stride_sink",
    ]
)  # fmt: skip
def reduce_splits_kernel(
    # tensors, each followed by its strides in elements
    p_partial_out, stride_ps, stride_ph, stride_psplit, stride_pd,  # [num_seqs, num_q_heads, num_splits, head_size]
    p_partial_lse, stride_plse_s, stride_plse_h, stride_plse_split,  # [num_seqs, num_q_heads, num_splits]
    p_out, stride_os, stride_oh, stride_od,  # [num_seqs, num_q_heads, head_size]
    p_lse, stride_lse_s, stride_lse_h,  # [num_seqs, num_q_heads]
    p_sinks, stride_sink,  # [num_q_heads], None unless asked for
    # scalars
    num_splits, head_size,
    # constants
    CHUNK: tl.constexpr,  # splits per step, a power of two
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
):  # fmt: skip
    """Grid ``(num_seqs, num_q_heads)``."""
    i_seq = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    o_split = tl.arange(0, CHUNK).to(tl.int64)
    m_d = o_d < head_size
    p_partial_out += i_seq * stride_ps + i_head * stride_ph
    p_partial_lse += i_seq * stride_plse_s + i_head * stride_plse_h

    row_max = tl.full([], float("-inf"), tl.float32)
    exp_sum = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, CHUNK):
        i_split = start + o_split
        m_split = i_split < num_splits
        b_s = tl.load(p_partial_lse + i_split * stride_plse_split, mask=m_split, other=float("-inf"))  # [CHUNK]
        m_used = (b_s > float("-inf"))[:, None] & m_d[None, :]
        o_partial = (i_split * stride_psplit)[:, None] + (o_d * stride_pd)[None, :]
        b_v = tl.load(p_partial_out + o_partial, mask=m_used, other=0.0)  # [CHUNK, BLOCK_D]

        new_max = tl.maximum(row_max, tl.max(b_s, axis=0))
        ref = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp(row_max - ref)
        b_p = tl.exp(b_s - ref)  # [CHUNK]
        exp_sum = exp_sum * alpha + tl.sum(b_p, axis=0)
        acc = acc * alpha + tl.sum(b_p[:, None] * b_v.to(tl.float32), axis=0)
        row_max = new_max

    if p_sinks is not None:
        sink = tl.load(p_sinks + i_head * stride_sink)
        row_max, exp_sum, acc = add_sink(row_max, exp_sum, acc, sink)

    p_out += i_seq * stride_os + i_head * stride_oh
    p_lse += i_seq * stride_lse_s + i_head * stride_lse_h
    store_state(p_out, p_lse, o_d, m_d, stride_od, row_max, exp_sum, acc)
