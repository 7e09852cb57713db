"""New tokens of K or of V go into the slots of a paged cache that a mapping names, quantised on the way if asked to.

    page = slot // block_size        place = slot % block_size        cache[page, place] = x / scale

K may be rotated before, in float32: a pair (x, y), of halves or of neighbours, becomes (x cos - y sin, y cos + x sin),
with the row of a table that the token's position names.

One program per token and head. A scale for each token and head is max |x| / 448 (or 127), as vLLM's
``_reshape_cache_per_token_head`` has it; a row of zeros gets 1e-6, so that nothing is divided by zero. int8 numbers are
rounded half away from zero; the float8 store rounds to nearest. In 4 bits a code is x / scale + zero, with scale =
(max x - min x) / 15, where 0 counts as one of the x, and zero = -min x / scale, both rounded; two lie in a byte, the
first in its lower half. NVFP4 has signed codes for 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and for each 16 numbers a scale
max |x| / 6 in float8_e4m3fn, divided by one of the whole tensor; it rounds to the nearest, of two to the even one.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl


@triton.jit
def _load(p_row, o_d, m_d, p_rope, p_positions, i_token, rope_size, IS_NEOX: tl.constexpr):
    """The numbers ``o_d`` of a row as they are, or rotated; 0 where masked."""
    b_x = tl.load(p_row + o_d, mask=m_d, other=0.0)
    if p_rope is not None:
        half = rope_size // 2
        m_r = m_d & (o_d < rope_size)
        if IS_NEOX:
            is_first = o_d < half
            o_pair = tl.where(is_first, o_d, o_d - half)
            o_other = tl.where(is_first, o_d + half, o_d - half)
        else:
            is_first = o_d % 2 == 0
            o_pair = o_d // 2
            o_other = tl.where(is_first, o_d + 1, o_d - 1)
        p_angle = p_rope + tl.load(p_positions + i_token) * rope_size + o_pair
        b_cos = tl.load(p_angle, mask=m_r, other=1.0)
        b_sin = tl.load(p_angle + half, mask=m_r, other=0.0)
        b_other = tl.load(p_row + o_other, mask=m_r, other=0.0).to(tl.float32)
        b_x = b_x.to(tl.float32)
        b_x = tl.where(m_r, b_x * b_cos + tl.where(is_first, -b_other, b_other) * b_sin, b_x)
    return b_x


@triton.jit(
    do_not_specialize=[
        "stride_xt", "stride_xh", "stride_cb", "stride_cp", "stride_ch", "stride_sb", "stride_sp", "stride_sh",
        "rope_size", "block_size",
    ]
)  # fmt: skip
def cache_write_kernel(
    p_new, stride_xt, stride_xh,  # [num_tokens, num_kv_heads, head_size], the last dimension contiguous
    p_cache, stride_cb, stride_cp, stride_ch,  # [num_blocks, block_size, num_kv_heads, head_size]
    p_slots,  # [num_tokens], int64
    p_scale,  # [1] that is given, [num_blocks, block_size, num_kv_heads] to be written, or None
    stride_sb, stride_sp, stride_sh,
    p_rope, p_positions,  # [positions, rope_size] in float32, cosines first, and [num_tokens] in int64; or None
    rope_size,
    block_size,
    head_size,
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
    PER_TOKEN: tl.constexpr,
    LARGEST: tl.constexpr,  # number of the cache's format
    IS_INT: tl.constexpr,
    IS_NEOX: tl.constexpr,
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

    p_row = p_new + i_token * stride_xt + i_head * stride_xh
    b_new = _load(p_row, o_d, m_d, p_rope, p_positions, i_token, rope_size, IS_NEOX)  # [BLOCK_D]
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


@triton.jit(
    do_not_specialize=[
        "stride_xt", "stride_xh", "stride_cb", "stride_cp", "stride_ch", "stride_sb", "stride_sp", "stride_sh",
        "stride_zb", "stride_zp", "stride_zh", "rope_size", "block_size", "half_size",
    ]
)  # fmt: skip
def cache_write_int4_kernel(
    p_new, stride_xt, stride_xh,  # [num_tokens, num_kv_heads, head_size], the last dimension contiguous
    p_cache, stride_cb, stride_cp, stride_ch,  # [num_blocks, block_size, num_kv_heads, head_size / 2]
    p_slots,  # [num_tokens], int64
    p_scale,  # [num_blocks, block_size, num_kv_heads]
    stride_sb, stride_sp, stride_sh,
    p_zero,  # likewise
    stride_zb, stride_zp, stride_zh,
    p_rope, p_positions,  # [positions, rope_size] in float32, cosines first, and [num_tokens] in int64; or None
    rope_size,
    block_size,
    half_size,
    BLOCK_B: tl.constexpr,  # half_size rounded up to a power of two
    IS_NEOX: tl.constexpr,
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

    p_row = p_new + i_token * stride_xt + i_head * stride_xh
    b_first = _load(p_row, 2 * o_b, m_b, p_rope, p_positions, i_token, rope_size, IS_NEOX).to(tl.float32)  # [BLOCK_B]
    b_second = _load(p_row, 2 * o_b + 1, m_b, p_rope, p_positions, i_token, rope_size, IS_NEOX).to(tl.float32)
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


@triton.jit
def _e2m1(b_x):
    """Codes of float32 numbers."""
    b_size = tl.abs(b_x)
    b_code = (b_size > 0.25).to(tl.int32) + (b_size >= 0.75).to(tl.int32) + (b_size > 1.25).to(tl.int32)
    b_code += (b_size >= 1.75).to(tl.int32) + (b_size > 2.5).to(tl.int32) + (b_size >= 3.5).to(tl.int32)
    return b_code + (b_size > 5.0).to(tl.int32) + tl.where(b_x < 0, 8, 0)


@triton.jit(
    do_not_specialize=[
        "stride_xt", "stride_xh", "stride_cb", "stride_cp", "stride_ch", "stride_sb", "stride_sp", "stride_sh",
        "rope_size", "block_size", "num_scales",
    ]
)  # fmt: skip
def cache_write_nvfp4_kernel(
    p_new, stride_xt, stride_xh,  # [num_tokens, num_kv_heads, head_size], the last dimension contiguous
    p_cache, stride_cb, stride_cp, stride_ch,  # [num_blocks, block_size, num_kv_heads, head_size / 2]
    p_slots,  # [num_tokens], int64
    p_scale,  # [num_blocks, block_size, num_kv_heads, head_size / 16], the last dimension contiguous
    stride_sb, stride_sp, stride_sh,
    p_global,  # [1]
    p_rope, p_positions,  # [positions, rope_size] in float32, cosines first, and [num_tokens] in int64; or None
    rope_size,
    block_size,
    num_scales,
    BLOCK_S: tl.constexpr,  # num_scales rounded up to a power of two
    IS_NEOX: tl.constexpr,
):  # fmt: skip
    """Grid ``(num_tokens, num_kv_heads)``."""
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + i_token)
    if slot < 0:  # padding
        return
    i_page = slot // block_size
    i_place = slot % block_size
    o_s = tl.arange(0, BLOCK_S).to(tl.int64)
    m_s = o_s < num_scales
    o_b = o_s[:, None] * 8 + tl.arange(0, 8).to(tl.int64)[None, :]  # [BLOCK_S, 8], bytes
    m_b = m_s[:, None] & (o_b >= 0)

    p_row = p_new + i_token * stride_xt + i_head * stride_xh
    b_first = _load(p_row, 2 * o_b, m_b, p_rope, p_positions, i_token, rope_size, IS_NEOX).to(tl.float32)
    b_second = _load(p_row, 2 * o_b + 1, m_b, p_rope, p_positions, i_token, rope_size, IS_NEOX).to(tl.float32)
    of_all = tl.load(p_global)
    b_most = tl.max(tl.maximum(tl.abs(b_first), tl.abs(b_second)), axis=1)
    b_scale = tl.minimum(b_most / 6.0 / of_all, 448.0).to(tl.float8e4nv)
    b_by = b_scale.to(tl.float32) * of_all
    b_by = tl.where(b_by == 0.0, 0.0, 1.0 / tl.where(b_by == 0.0, 1.0, b_by))[:, None]

    tl.store(p_scale + i_page * stride_sb + i_place * stride_sp + i_head * stride_sh + o_s, b_scale, mask=m_s)
    p_cache += i_page * stride_cb + i_place * stride_cp + i_head * stride_ch
    tl.store(p_cache + o_b, (_e2m1(b_first * b_by) | _e2m1(b_second * b_by) << 4).to(tl.uint8), mask=m_b)
