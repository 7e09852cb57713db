"""Merging two attention states of the same queries over disjoint keys (prefix cache, chunked prefill, cascade).

    m = max(lse_p, lse_s)        w_p = exp(lse_p - m)        w_s = exp(lse_s - m)
    out = (w_p · out_p + w_s · out_s) / (w_p + w_s)          lse = m + log(w_p + w_s)

the two-way case of FlashInfer's state merge (Ye et al., arXiv 2501.01005). An LSE of -inf marks a side without keys;
some producers write +inf for it (FlashAttention, for a row without keys), so +inf is read as -inf. An empty side's
output is undefined, often NaN, and must not be used. Two empty sides give 0 and -inf.

One program per token and head, as in vLLM's kernel for this. It is easy to read, and takes three times as long as the
memory needs (head size 128, on an H100): ``merge_states_wide`` says why, and does better.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.softmax_state import store_state


@triton.jit(
    do_not_specialize=[
        "stride_pt", "stride_ph", "stride_st", "stride_sh", "stride_ot", "stride_oh",
        "stride_plse_t", "stride_plse_h", "stride_slse_t", "stride_slse_h", "stride_lse_t", "stride_lse_h",
    ]
)  # fmt: skip
def merge_states_kernel(
    # tensors, each followed by its strides in elements
    p_prefix, stride_pt, stride_ph, stride_pd,  # [num_tokens, num_heads, head_size]
    p_suffix, stride_st, stride_sh, stride_sd,  # [num_tokens, num_heads, head_size]
    # [num_tokens, num_heads], or with the axes exchanged in memory: only the strides tell
    p_prefix_lse, stride_plse_t, stride_plse_h,
    p_suffix_lse, stride_slse_t, stride_slse_h,
    p_out, stride_ot, stride_oh, stride_od,  # [num_tokens, num_heads, head_size]
    p_lse, stride_lse_t, stride_lse_h,  # None if it is not wanted
    # scalars
    head_size,
    # constants
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
    IN_PLACE: tl.constexpr,  # the LSE that is stored replaces one that was loaded
):  # fmt: skip
    """Grid ``(num_tokens, num_heads)``."""
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    m_d = o_d < head_size

    lse_p = tl.load(p_prefix_lse + i_token * stride_plse_t + i_head * stride_plse_h)
    lse_s = tl.load(p_suffix_lse + i_token * stride_slse_t + i_head * stride_slse_h)
    lse_p = tl.where(lse_p == float("inf"), float("-inf"), lse_p)
    lse_s = tl.where(lse_s == float("inf"), float("-inf"), lse_s)

    p_prefix += i_token * stride_pt + i_head * stride_ph
    p_suffix += i_token * stride_st + i_head * stride_sh
    b_prefix = tl.load(p_prefix + o_d * stride_pd, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK_D]
    b_suffix = tl.load(p_suffix + o_d * stride_sd, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK_D]

    row_max = tl.maximum(lse_p, lse_s)
    ref = tl.where(row_max == float("-inf"), 0.0, row_max)
    w_p = tl.exp(lse_p - ref)
    w_s = tl.exp(lse_s - ref)
    # Selected, not multiplied: 0 · NaN is not 0.
    acc = tl.where(w_p > 0.0, w_p * b_prefix, 0.0) + tl.where(w_s > 0.0, w_s * b_suffix, 0.0)

    if IN_PLACE:  # every thread loads both LSEs, one stores the result
        tl.debug_barrier()
    p_out += i_token * stride_ot + i_head * stride_oh
    if p_lse is not None:
        p_lse += i_token * stride_lse_t + i_head * stride_lse_h
    store_state(p_out, p_lse, o_d, m_d, stride_od, row_max, w_p + w_s, acc)
