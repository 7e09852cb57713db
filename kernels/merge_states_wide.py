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

A grid may have fewer programs than there are blocks; each then takes every ``num_programs``-th one, and with
``STAGES > 1`` loads the next while it stores the last.

A result may take an input's place, element for element. Of an output's elements each thread stores those that it has
loaded. An LSE is loaded by all threads that hold a part of its row and stored by one of them, so that in place a
barrier must stand between the two.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

__all__ = ["merge_states_wide_kernel"]


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_heads", "stride_pt", "stride_ph", "stride_st", "stride_sh", "stride_ot", "stride_oh",
        "stride_plse_t", "stride_plse_h", "stride_slse_t", "stride_slse_h", "stride_lse_t", "stride_lse_h",
    ]
)  # fmt: skip
def merge_states_wide_kernel(
    # inputs
    p_prefix,  # [num_tokens, num_heads, head_size]
    p_suffix,  # [num_tokens, num_heads, head_size]
    p_prefix_lse,  # [num_heads, num_tokens] or [num_tokens, num_heads]: only the strides tell
    p_suffix_lse,
    # outputs
    p_out,  # [num_tokens, num_heads, head_size]
    p_lse,
    # scalars
    num_tokens,
    num_heads,
    # strides: t token, h head, both in units of ALIGN elements; d head dimension, and all of LSEs, in elements
    stride_pt, stride_ph, stride_pd,
    stride_st, stride_sh, stride_sd,
    stride_plse_t, stride_plse_h,
    stride_slse_t, stride_slse_h,
    stride_ot, stride_oh, stride_od,
    stride_lse_t, stride_lse_h,
    # constants
    HEAD_SIZE: tl.constexpr,
    ALIGN: tl.constexpr,  # elements, a divisor of every stride of t and h
    BLOCK_T: tl.constexpr,  # tokens per block, a power of two
    BLOCK_H: tl.constexpr,  # heads per block, a power of two
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
    PERSISTENT: tl.constexpr,  # fewer programs than blocks
    STAGES: tl.constexpr,  # blocks that a program has in flight
    EVICT: tl.constexpr,  # eviction_policy of the outputs that are read
    IN_PLACE: tl.constexpr,  # output_lse is one of the inputs
):  # fmt: skip
    """Grid ``(num_programs,)``, up to one for each block."""
    o_row = tl.arange(0, BLOCK_T * BLOCK_H)
    o_t = (o_row // BLOCK_H).to(tl.int64)
    o_h = (o_row % BLOCK_H).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    # of this block's elements from its first [BLOCK_T * BLOCK_H, BLOCK_D], and of its LSEs [BLOCK_T * BLOCK_H]
    o_prefix = ((o_t * stride_pt + o_h * stride_ph) * ALIGN)[:, None] + (o_d * stride_pd)[None, :]
    o_suffix = ((o_t * stride_st + o_h * stride_sh) * ALIGN)[:, None] + (o_d * stride_sd)[None, :]
    o_out = ((o_t * stride_ot + o_h * stride_oh) * ALIGN)[:, None] + (o_d * stride_od)[None, :]
    o_prefix_lse = o_t * stride_plse_t + o_h * stride_plse_h
    o_suffix_lse = o_t * stride_slse_t + o_h * stride_slse_h
    o_lse = o_t * stride_lse_t + o_h * stride_lse_h

    # Neighbouring blocks are neighbours in memory: heads, then tokens.
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    num_blocks = tl.cdiv(num_tokens, BLOCK_T) * head_blocks
    first = tl.program_id(0)
    stop = num_blocks if PERSISTENT else first + 1
    step = tl.num_programs(0) if PERSISTENT else 1
    for i_block in tl.range(first, stop, step, num_stages=STAGES):
        i_t = (i_block // head_blocks).to(tl.int64) * BLOCK_T
        i_h = (i_block % head_blocks).to(tl.int64) * BLOCK_H
        m_row = (i_t + o_t < num_tokens) & (i_h + o_h < num_heads)
        m_element = m_row[:, None] & (o_d < HEAD_SIZE)[None, :]

        p_block = p_prefix + (i_t * stride_pt + i_h * stride_ph) * ALIGN
        # [BLOCK_T * BLOCK_H, BLOCK_D] each
        b_prefix = tl.load(p_block + o_prefix, mask=m_element, other=0.0, eviction_policy=EVICT)
        p_block = p_suffix + (i_t * stride_st + i_h * stride_sh) * ALIGN
        b_suffix = tl.load(p_block + o_suffix, mask=m_element, other=0.0, eviction_policy=EVICT)
        p_row = p_prefix_lse + i_t * stride_plse_t + i_h * stride_plse_h
        lse_p = tl.load(p_row + o_prefix_lse, mask=m_row, other=float("-inf"))  # [BLOCK_T * BLOCK_H]
        p_row = p_suffix_lse + i_t * stride_slse_t + i_h * stride_slse_h
        lse_s = tl.load(p_row + o_suffix_lse, mask=m_row, other=float("-inf"))  # [BLOCK_T * BLOCK_H]

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
        p_block = p_out + (i_t * stride_ot + i_h * stride_oh) * ALIGN
        tl.store(p_block + o_out, b_out.to(p_out.dtype.element_ty), mask=m_element)  # [BLOCK_T * BLOCK_H, BLOCK_D]
        p_row = p_lse + i_t * stride_lse_t + i_h * stride_lse_h
        tl.store(p_row + o_lse, row_max + tl.log(divisor), mask=m_row)  # [BLOCK_T * BLOCK_H]
