"""Decode over a paged cache of 4 bits, two codes in a byte, the first in its lower half, or of 8 bits.

int4    x = (code - zero) · scale             a zero point and a scale for each token and head, apart or in one float32
8 bits  x = code · scale                      a scale for each token and head
nvfp4   x = e2m1(code) · scale · global       a scale for each 16 numbers, in float8_e4m3fn
mxfp4   x = e2m1(code) · 2^(scale - 127)      a scale for each 32 numbers
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl


@triton.jit
def _read(
    p_packed, p_scales, p_zeros, p_global, i_page, i_token, i_head, o_d, m_td,
    stride_cp, stride_ct, stride_ch, stride_sp, stride_st, stride_sh, stride_zp, stride_zt,
    BLOCK_SCALE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Numbers ``[TILE, BLOCK_D]`` of a KV head; 0 where masked."""
    at = i_page * stride_cp + i_token * stride_ct + i_head * stride_ch
    at_scale = i_page * stride_sp + i_token * stride_st + i_head * stride_sh
    if FORMAT == "8 bits":
        b_x = tl.load(p_packed + at[:, None] + o_d[None, :], mask=m_td, other=0.0).to(tl.float32)
        b_x *= tl.load(p_scales + at_scale[:, None] + 0 * o_d[None, :], mask=m_td, other=0.0)
    else:  # Triton compiles what follows a return, too
        b_byte = tl.load(p_packed + at[:, None] + (o_d // 2)[None, :], mask=m_td, other=0).to(tl.int32)
        b_code = (b_byte >> (o_d % 2 * 4).to(tl.int32)[None, :]) & 15
        b_scale = tl.load(p_scales + at_scale[:, None] + (o_d // BLOCK_SCALE)[None, :], mask=m_td, other=0.0)
        if FORMAT == "zeros in scales":
            bits = b_scale.to(tl.int32, bitcast=True)
            b_x = (b_code - (bits & 15)).to(tl.float32) * (bits & -16).to(tl.float32, bitcast=True)
        elif p_zeros is not None:
            at = i_page * stride_zp + i_token * stride_zt + i_head
            b_zero = tl.load(p_zeros + at[:, None] + 0 * o_d[None, :], mask=m_td, other=0).to(tl.int32)
            b_x = (b_code - b_zero).to(tl.float32) * b_scale
        else:
            b_low = b_code & 7
            # 0, 0.5, 1, 1.5, and then 2 and 3, 4 and 6
            b_more = ((2 + (b_low & 1)) * ((b_low >> 1) - 1)).to(tl.float32)
            b_size = tl.where(b_low < 4, b_low.to(tl.float32) * 0.5, b_more)
            b_x = tl.where(b_code >= 8, -b_size, b_size)
            if p_global is None:
                b_x = tl.where(m_td, b_x * (b_scale.to(tl.int32) << 23).to(tl.float32, bitcast=True), 0.0)
            else:
                b_x *= b_scale.to(tl.float32) * tl.load(p_global)
    return b_x


# As in dense_decode: no specialisation on what only places a base pointer or divides an index.
@triton.jit(
    do_not_specialize=[
        "group", "page_size", "stride_qs", "stride_bs", "stride_os",
        "stride_sp", "stride_st", "stride_sh", "stride_zp", "stride_zt",
    ]
)  # fmt: skip
def packed_decode_kernel(
    # tensors, each followed by its strides in elements; last dimensions are contiguous
    p_q, stride_qs, stride_qh,  # [num_seqs, num_q_heads, head_size]
    p_k, p_k_scales, p_k_zeros, p_k_global,  # [pages, page_size, num_kv_heads, ...]; V lies as K does
    p_v, p_v_scales, p_v_zeros, p_v_global,
    stride_cp, stride_ct, stride_ch,
    stride_sp, stride_st, stride_sh,
    stride_zp, stride_zt,
    p_table, stride_bs,  # [num_seqs, columns]
    p_lens,  # [num_seqs]
    p_out, stride_os, stride_oh,  # as q
    # scalars
    scale,
    group,  # query heads per KV head
    page_size,
    head_size,
    # constants
    TILE: tl.constexpr,  # tokens per step, a power of two
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
    BLOCK_SCALE: tl.constexpr,  # numbers that share a scale
    FORMAT: tl.constexpr,  # "8 bits", "zeros in scales", or "" for what the pointers say
):  # fmt: skip
    """Grid ``num_seqs, num_q_heads``."""
    i_seq = tl.program_id(0).to(tl.int64)
    i_q = tl.program_id(1).to(tl.int64)
    i_head = i_q // group
    seq_len = tl.load(p_lens + i_seq)
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    m_d = o_d < head_size
    b_q = tl.load(p_q + i_seq * stride_qs + i_q * stride_qh + o_d, mask=m_d, other=0.0).to(tl.float32) * scale

    row_max = float("-inf")
    exp_sum = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, seq_len, TILE):
        o_t = start + tl.arange(0, TILE)
        m_t = o_t < seq_len
        i_page = tl.load(p_table + i_seq * stride_bs + o_t // page_size, mask=m_t, other=0).to(tl.int64)
        i_token = o_t % page_size
        m_td = m_t[:, None] & m_d[None, :]
        b_k = _read(
            p_k, p_k_scales, p_k_zeros, p_k_global, i_page, i_token, i_head, o_d, m_td,
            stride_cp, stride_ct, stride_ch, stride_sp, stride_st, stride_sh, stride_zp, stride_zt, BLOCK_SCALE, FORMAT,
        )  # fmt: skip
        b_v = _read(
            p_v, p_v_scales, p_v_zeros, p_v_global, i_page, i_token, i_head, o_d, m_td,
            stride_cp, stride_ct, stride_ch, stride_sp, stride_st, stride_sh, stride_zp, stride_zt, BLOCK_SCALE, FORMAT,
        )  # fmt: skip
        b_s = tl.where(m_t, tl.sum(b_k * b_q[None, :], axis=1), float("-inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, axis=0))  # finite: a tile has a token
        alpha = tl.exp(row_max - new_max)
        b_w = tl.exp(b_s - new_max)
        exp_sum = exp_sum * alpha + tl.sum(b_w, axis=0)
        acc = acc * alpha + tl.sum(b_w[:, None] * b_v, axis=0)
        row_max = new_max

    b_out = acc / tl.where(exp_sum == 0.0, 1.0, exp_sum)
    tl.store(p_out + i_seq * stride_os + i_q * stride_oh + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)
