"""Merging any number of attention states of the same queries over disjoint keys.

    m = max_i lse_i        w_i = exp(lse_i - m)        out = Σ_i w_i · out_i / Σ_i w_i        lse = m + log Σ_i w_i

LSEs are few, so they are read twice: once for the maximum, then for the weights. Nothing is rescaled then, as it would
be by an online softmax. Empty states (an LSE of -inf or +inf) have the weight 0, and their outputs, which may be NaN,
are not even loaded: the LSE is known before. Without any keys, or without any states, the result is 0 and -inf.

A program takes a block of tokens × heads, and strides come divided by ``ALIGN``, both as in ``merge_states_wide``.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl


@triton.jit
def _load_lse(p_lse, m_row):
    b_lse = tl.load(p_lse, mask=m_row, other=float("-inf"))  # [BLOCK_T * BLOCK_H]
    return tl.where(b_lse == float("inf"), float("-inf"), b_lse)


@triton.jit(
    do_not_specialize=[
        "num_states", "num_tokens", "num_heads", "stride_pn", "stride_pt", "stride_ph", "stride_plse_n",
        "stride_plse_t", "stride_plse_h", "stride_ot", "stride_oh", "stride_lse_t", "stride_lse_h",
    ]
)  # fmt: skip
def merge_many_kernel(
    # tensors, each followed by its strides in elements; those of outputs, but for the last, in units of ALIGN elements
    p_outs, stride_pn, stride_pt, stride_ph, stride_pd,  # [num_states, num_tokens, num_heads, head_size]
    # [num_states, num_tokens, num_heads], or with the last axes exchanged in memory: only the strides tell
    p_lses, stride_plse_n, stride_plse_t, stride_plse_h,
    p_out, stride_ot, stride_oh, stride_od,  # [num_tokens, num_heads, head_size]
    p_lse, stride_lse_t, stride_lse_h,  # None if it is not wanted
    # scalars
    num_states, num_tokens, num_heads,
    # constants
    HEAD_SIZE: tl.constexpr,
    ALIGN: tl.constexpr,  # elements, a divisor of every stride of n, t and h
    BLOCK_T: tl.constexpr,  # tokens per program, a power of two
    BLOCK_H: tl.constexpr,  # heads per program, a power of two
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
):  # fmt: skip
    """Grid ``(ceil(num_tokens / BLOCK_T) * ceil(num_heads / BLOCK_H),)``."""
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    o_row = tl.arange(0, BLOCK_T * BLOCK_H)
    i_t = (tl.program_id(0) // head_blocks).to(tl.int64) * BLOCK_T + o_row // BLOCK_H
    i_h = (tl.program_id(0) % head_blocks).to(tl.int64) * BLOCK_H + o_row % BLOCK_H
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    m_row = (i_t < num_tokens) & (i_h < num_heads)
    m_d = o_d < HEAD_SIZE
    p_rows = p_lses + i_t * stride_plse_t + i_h * stride_plse_h
    p_elements = p_outs + ((i_t * stride_pt + i_h * stride_ph) * ALIGN)[:, None] + (o_d * stride_pd)[None, :]

    row_max = tl.full([BLOCK_T * BLOCK_H], float("-inf"), tl.float32)
    for i in range(num_states):
        i_state = tl.full([], 0, tl.int64) + i
        row_max = tl.maximum(row_max, _load_lse(p_rows + i_state * stride_plse_n, m_row))
    ref = tl.where(row_max == float("-inf"), 0.0, row_max)

    exp_sum = tl.zeros([BLOCK_T * BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_T * BLOCK_H, BLOCK_D], tl.float32)
    for i in range(num_states):
        i_state = tl.full([], 0, tl.int64) + i
        b_w = tl.exp(_load_lse(p_rows + i_state * stride_plse_n, m_row) - ref)
        m_used = (b_w > 0.0)[:, None] & m_d[None, :]
        p_state = p_elements + i_state * stride_pn * ALIGN
        b_out = tl.load(p_state, mask=m_used, other=0.0)  # [BLOCK_T * BLOCK_H, BLOCK_D]
        acc += b_w[:, None] * b_out.to(tl.float32)
        exp_sum += b_w

    divisor = tl.where(exp_sum == 0.0, 1.0, exp_sum)
    b_out = acc * (1.0 / divisor)[:, None]
    p_elements = p_out + ((i_t * stride_ot + i_h * stride_oh) * ALIGN)[:, None] + (o_d * stride_od)[None, :]
    tl.store(p_elements, b_out.to(p_out.dtype.element_ty), mask=m_row[:, None] & m_d[None, :])
    if p_lse is not None:
        tl.store(p_lse + i_t * stride_lse_t + i_h * stride_lse_h, row_max + tl.log(divisor), mask=m_row)
