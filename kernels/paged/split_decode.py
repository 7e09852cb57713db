"""Split-K decode attention, first stage: each split of a sequence's tokens becomes a partial state.

A sequence is cut into ``num_splits`` ranges of ``ceil(seq_len / num_splits)`` tokens, and a program per (sequence,
query head, split) attends over one of them, so that few long sequences still fill a GPU (Flash-Decoding, Dao et al.
2023). The cut is computed here, from the length on the device: the host never waits for it.

Split ``s`` covers ``[s · per_split, min((s + 1) · per_split, seq_len))``. Rounding up leaves late splits empty when the
tokens run out (5 tokens in 4 splits: 2 + 2 + 1 + 0). An empty split still writes its state, 0 and -inf, because the
second stage, ``reduce_splits``, reads every slot. A sliding window leaves early splits empty, or parts of them.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.softmax_state import store_state
from attnfuzz.kernels.paged.paged_walk import attend_pages


# As in dense_decode: no specialisation on what only places a base pointer or divides an index.
@triton.jit(
    do_not_specialize=[
        "num_splits", "group_size", "block_size", "stride_qs", "stride_qh", "stride_table_s", "stride_len",
        "stride_os", "stride_oh", "stride_osplit", "stride_lse_s", "stride_lse_h", "stride_lse_split",
        "window", "stride_slope", "stride_k_scale", "stride_v_scale",
    ]
)  # fmt: skip
def split_decode_kernel(
    # tensors, each followed by its strides in elements
    p_q, stride_qs, stride_qh, stride_qd,  # [num_seqs, num_q_heads, head_size]
    p_k, stride_kb, stride_kt, stride_kh, stride_kdo, stride_kx,  # see paged_walk
    p_v, stride_vb, stride_vt, stride_vh, stride_vd,
    p_table, stride_table_s, stride_page,  # [num_seqs, max_blocks_per_seq]
    p_seq_lens, stride_len,  # [num_seqs]
    # of each split, whose softmax is already normalised
    p_out, stride_os, stride_oh, stride_osplit, stride_od,  # [num_seqs, num_q_heads, num_splits, v_head_size]
    p_lse, stride_lse_s, stride_lse_h, stride_lse_split,  # [num_seqs, num_q_heads, num_splits]
    # scalars
    scale, num_splits,
    block_size,  # tokens per page
    group_size,  # query heads per KV head
    head_size, v_head_size,
    # variants (see the wrapper): None unless asked for
    window, soft_cap,
    p_slopes, stride_slope,  # [num_q_heads]
    p_k_scale, stride_k_scale,  # [1] or [num_kv_heads], of an 8-bit cache
    p_v_scale, stride_v_scale,
    # constants
    X: tl.constexpr,  # innermost K elements of the packed layout, otherwise 1
    TILE: tl.constexpr,  # keys per step, a power of two, whatever the page size
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
    BLOCK_DV: tl.constexpr,  # v_head_size likewise
):  # fmt: skip
    """Grid ``(num_seqs, num_q_heads, num_splits)``."""
    i_seq = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    i_split = tl.program_id(2).to(tl.int64)
    i_kv_head = i_head // group_size
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    o_dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    m_d = o_d < head_size
    m_dv = o_dv < v_head_size

    seq_len = tl.load(p_seq_lens + i_seq * stride_len)
    per_split = tl.cdiv(seq_len, num_splits)
    begin = tl.program_id(2) * per_split
    end = tl.minimum(begin + per_split, seq_len)

    p_q += i_seq * stride_qs + i_head * stride_qh
    b_q = tl.load(p_q + o_d * stride_qd, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK_D]
    slope = tl.load(p_slopes + i_head * stride_slope) if p_slopes is not None else None
    if p_k_scale is not None:
        scale *= tl.load(p_k_scale + i_kv_head * stride_k_scale)
    row_max, exp_sum, acc = attend_pages(
        b_q, p_k + i_kv_head * stride_kh, stride_kb, stride_kt, stride_kdo, stride_kx,
        p_v + i_kv_head * stride_vh, stride_vb, stride_vt, stride_vd, p_table + i_seq * stride_table_s, stride_page,
        begin, end, scale, block_size, o_d, m_d, o_dv, m_dv, seq_len - 1, window, soft_cap, slope, X, TILE, BLOCK_DV,
    )  # fmt: skip
    if p_k_scale is not None:
        acc *= tl.load(p_v_scale + i_kv_head * stride_v_scale)

    p_out += i_seq * stride_os + i_head * stride_oh + i_split * stride_osplit
    p_lse += i_seq * stride_lse_s + i_head * stride_lse_h + i_split * stride_lse_split
    store_state(p_out, p_lse, o_dv, m_dv, stride_od, row_max, exp_sum, acc)
