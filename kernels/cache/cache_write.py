"""New tokens of K or of V go into the slots of a paged cache that a mapping names, quantised on the way if asked to.

    page = slot // block_size        place = slot % block_size        cache[page, place] = x / scale

One program per token and head. A scale for each token and head is max |x| / 448 (or 127), as vLLM's
``_reshape_cache_per_token_head`` has it; a row of zeros gets 1e-6, so that nothing is divided by zero. int8 numbers are
rounded half away from zero; the float8 store rounds to nearest. In 4 bits a code is x / scale + zero, with scale =
(max x - min x) / 15, where 0 counts as one of the x, and zero = -min x / scale, both rounded; two lie in a byte, the
first in its lower half.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

__all__ = ["cache_write_int4_kernel", "cache_write_kernel"]


@triton.jit(do_not_specialize=["stride_xt", "stride_xh", "stride_cb", "stride_cp", "stride_ch"])
def cache_write_kernel(
    p_new, stride_xt, stride_xh,  # [num_tokens, num_kv_heads, head_size], the last dimension contiguous
    p_cache, stride_cb, stride_cp, stride_ch,  # [num_blocks, block_size, num_kv_heads, head_size]
    p_slots,  # [num_tokens], int64
    p_scale,  # [1] that is given, [num_blocks, block_size, num_kv_heads] to be written, or None
    stride_sb, stride_sp, stride_sh,
    block_size,
    head_size,
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
    PER_TOKEN: tl.constexpr,
    LARGEST: tl.constexpr,  # number of the cache's format
    IS_INT: tl.constexpr,
):  # fmt: skip
    """Grid ``(num_tokens, num_kv_heads)``."""
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + i_token)
    if slot < 0:  # padding
        return
    i_page = slot // block_size
    i_place = slot % block_size
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    m_d = o_d < head_size

    b_new = tl.load(p_new + i_token * stride_xt + i_head * stride_xh + o_d, mask=m_d, other=0.0)  # [BLOCK_D]
    if p_scale is not None:
        b_new = b_new.to(tl.float32)
        if PER_TOKEN:
            scale = tl.maximum(tl.max(tl.abs(b_new)) / LARGEST, 1e-6)
            tl.store(p_scale + i_page * stride_sb + i_place * stride_sp + i_head * stride_sh, scale)
        else:
            scale = tl.load(p_scale)
        b_new = b_new / scale
        if IS_INT:
            b_new = tl.where(b_new >= 0, b_new + 0.5, b_new - 0.5)  # the store cuts off
        b_new = tl.minimum(tl.maximum(b_new, -LARGEST), LARGEST)
    p_cache += i_page * stride_cb + i_place * stride_cp + i_head * stride_ch
    tl.store(p_cache + o_d, b_new.to(p_cache.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["stride_xt", "stride_xh", "stride_cb", "stride_cp", "stride_ch"])
def cache_write_int4_kernel(
    p_new, stride_xt, stride_xh,  # [num_tokens, num_kv_heads, head_size], the last dimension contiguous
    p_cache, stride_cb, stride_cp, stride_ch,  # [num_blocks, block_size, num_kv_heads, head_size / 2]
    p_slots,  # [num_tokens], int64
    p_scale,  # [num_blocks, block_size, num_kv_heads]
    stride_sb, stride_sp, stride_sh,
    p_zero,  # likewise
    stride_zb, stride_zp, stride_zh,
    block_size,
    half_size,
    BLOCK_B: tl.constexpr,  # half_size rounded up to a power of two
):  # fmt: skip
    """Grid ``(num_tokens, num_kv_heads)``."""
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + i_token)
    if slot < 0:  # padding
        return
    i_page = slot // block_size
    i_place = slot % block_size
    o_b = tl.arange(0, BLOCK_B).to(tl.int64)
    m_b = o_b < half_size

    p_row = p_new + i_token * stride_xt + i_head * stride_xh + 2 * o_b
    b_first = tl.load(p_row, mask=m_b, other=0.0).to(tl.float32)  # [BLOCK_B]
    b_second = tl.load(p_row + 1, mask=m_b, other=0.0).to(tl.float32)
    least = tl.minimum(tl.min(tl.minimum(b_first, b_second)), 0.0)  # masked ones are 0
    most = tl.maximum(tl.max(tl.maximum(b_first, b_second)), 0.0)
    scale = tl.maximum((most - least) / 15.0, 1e-6)
    zero = tl.minimum(tl.maximum(tl.floor(-least / scale + 0.5), 0.0), 15.0)
    b_first = tl.minimum(tl.maximum(tl.floor(b_first / scale + zero + 0.5), 0.0), 15.0).to(tl.int32)
    b_second = tl.minimum(tl.maximum(tl.floor(b_second / scale + zero + 0.5), 0.0), 15.0).to(tl.int32)

    tl.store(p_scale + i_page * stride_sb + i_place * stride_sp + i_head * stride_sh, scale)
    tl.store(p_zero + i_page * stride_zb + i_place * stride_zp + i_head * stride_zh, zero.to(tl.uint8))
    p_cache += i_page * stride_cb + i_place * stride_cp + i_head * stride_ch
    tl.store(p_cache + o_b, (b_first | b_second << 4).to(tl.uint8), mask=m_b)
