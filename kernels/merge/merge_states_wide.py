"""Merging two attention states, with programs wide enough to reach memory bandwidth on small heads.

The formulas are those of ``merge_states``, whose program takes one vector of ``head_size`` numbers: with head size 128
in float16 that is 256 bytes of each tensor, two for each of 128 threads, and most of the time goes into starting
programs and waiting for a single load. Merging does next to nothing with a number, so what counts is how many bytes are
on their way at once, and that few instructions ask for them:

* A program takes a block of ``BLOCK_T`` tokens × ``BLOCK_H`` heads. Its threads read 16 bytes at a time, several times
  before the first arrives.
* Heads lie beside each other in memory, and tokens in LSEs ``[num_heads, num_tokens]``: 8 tokens of a head fill a
  32-byte sector. A block that is a few tokens high and a few heads wide does justice to both.
* Both weights are normalised, once for a row, in place of a division for each element:

      out = (w_p / (w_p + w_s)) · out_p + (w_s / (w_p + w_s)) · out_s

* That 16 bytes may be read at once is for the compiler to prove. It knows that the last axis is contiguous (Triton
  specialises on a stride of 1), but not that each row begins at a multiple of 16 bytes. So strides come divided by
  ``ALIGN`` and are multiplied by it here: a hint may be wrong, a product cannot.

On an H100 this runs at 98 to 100 % of the rate of a copy. Fewer programs that loop over the blocks, with or without
loads in flight from one block to the next, and other cache policies were slower.

A result may take an input's place, element for element. Of an output's elements each thread stores those that it has
loaded. An LSE is loaded by all threads that hold a part of its row and stored by one of them, so that in place a
barrier must stand between the two.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_heads", "stride_pt", "stride_ph", "stride_st", "stride_sh", "stride_ot", "stride_oh",
        "stride_plse_t", "stride_plse_h", "stride_slse_t", "stride_slse_h", "stride_lse_t", "stride_lse_h",
    ]
)  # fmt: skip
def merge_states_wide_kernel(
    # tensors, each followed by its strides in elements; those of token and head of outputs in units of ALIGN elements
    p_prefix, stride_pt, stride_ph, stride_pd,  # [num_tokens, num_heads, head_size]
    p_suffix, stride_st, stride_sh, stride_sd,  # [num_tokens, num_heads, head_size]
    # [num_tokens, num_heads], or with the axes exchanged in memory: only the strides tell
    p_prefix_lse, stride_plse_t, stride_plse_h,
    p_suffix_lse, stride_slse_t, stride_slse_h,
    p_out, stride_ot, stride_oh, stride_od,  # [num_tokens, num_heads, head_size]
    p_lse, stride_lse_t, stride_lse_h,  # None if it is not wanted
    # scalars
    num_tokens, num_heads,
    # constants
    HEAD_SIZE: tl.constexpr,
    ALIGN: tl.constexpr,  # elements, a divisor of every stride of t and h
    BLOCK_T: tl.constexpr,  # tokens per block, a power of two
    BLOCK_H: tl.constexpr,  # heads per block, a power of two
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
    IN_PLACE: tl.constexpr,  # a result is the memory of an input
):  # fmt: skip
    """Grid ``(ceil(num_tokens / BLOCK_T) * ceil(num_heads / BLOCK_H),)``."""
    # Neighbouring blocks are neighbours in memory: heads, then tokens.
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    o_row = tl.arange(0, BLOCK_T * BLOCK_H)
    i_t = (tl.program_id(0) // head_blocks).to(tl.int64) * BLOCK_T + o_row // BLOCK_H
    i_h = (tl.program_id(0) % head_blocks).to(tl.int64) * BLOCK_H + o_row % BLOCK_H
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    m_row = (i_t < num_tokens) & (i_h < num_heads)
    m_element = m_row[:, None] & (o_d < HEAD_SIZE)[None, :]

    # [BLOCK_T * BLOCK_H, BLOCK_D] each; what a mask leaves undefined is not stored
    p_prefix += ((i_t * stride_pt + i_h * stride_ph) * ALIGN)[:, None] + (o_d * stride_pd)[None, :]
    p_suffix += ((i_t * stride_st + i_h * stride_sh) * ALIGN)[:, None] + (o_d * stride_sd)[None, :]
    b_prefix = tl.load(p_prefix, mask=m_element)
    b_suffix = tl.load(p_suffix, mask=m_element)
    # [BLOCK_T * BLOCK_H] each
    o_lse = i_t * stride_plse_t + i_h * stride_plse_h
    lse_p = tl.load(p_prefix_lse + o_lse, mask=m_row)
    o_lse = i_t * stride_slse_t + i_h * stride_slse_h
    lse_s = tl.load(p_suffix_lse + o_lse, mask=m_row)

    lse_p = tl.where(lse_p == float("inf"), float("-inf"), lse_p)
    lse_s = tl.where(lse_s == float("inf"), float("-inf"), lse_s)
    row_max = tl.maximum(lse_p, lse_s)
    ref = tl.where(row_max == float("-inf"), 0.0, row_max)
    w_p = tl.exp(lse_p - ref)
    w_s = tl.exp(lse_s - ref)
    exp_sum = w_p + w_s
    divisor = tl.where(exp_sum == 0.0, 1.0, exp_sum)
    w_p = w_p * (1.0 / divisor)
    w_s = w_s * (1.0 / divisor)
    # Selected, not multiplied: 0 · NaN is not 0.
    b_prefix = tl.where((w_p > 0.0)[:, None], b_prefix.to(tl.float32), 0.0)
    b_suffix = tl.where((w_s > 0.0)[:, None], b_suffix.to(tl.float32), 0.0)
    b_out = w_p[:, None] * b_prefix + w_s[:, None] * b_suffix

    if IN_PLACE:
        tl.debug_barrier()
    b_out = b_out.to(p_out.dtype.element_ty)
    p_out += ((i_t * stride_ot + i_h * stride_oh) * ALIGN)[:, None] + (o_d * stride_od)[None, :]
    tl.store(p_out, b_out, mask=m_element)  # [BLOCK_T * BLOCK_H, BLOCK_D]
    if p_lse is not None:
        tl.store(p_lse + i_t * stride_lse_t + i_h * stride_lse_h, row_max + tl.log(divisor), mask=m_row)
