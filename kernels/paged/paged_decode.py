"""Naive paged decode attention: one query token per sequence, K and V in a paged cache of any of the four layouts.

One program per (sequence, query head) takes the whole sequence: the first, unparallelised step of
"The Anatomy of a Triton Attention Kernel" (arXiv 2511.11581, §4.3), on the cache of PagedAttention
(Kwon et al., arXiv 2309.06180). ``paged_walk`` has the addresses and the loop. With few sequences most of a GPU
idles: ``split_decode`` adds the missing parallelism.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.score_variants import add_sink
from attnfuzz.kernels.common.softmax_state import store_state
from attnfuzz.kernels.paged.paged_walk import attend_pages


# As in dense_decode: no specialisation on what only places a base pointer or divides an index.
@triton.jit(
    do_not_specialize=[
        "group_size", "block_size", "stride_qs", "stride_qh", "stride_table_s", "stride_len", "stride_os", "stride_oh",
        "stride_lse_s", "stride_lse_h", "window", "stride_slope", "stride_sink", "stride_k_scale", "stride_v_scale",
    ]
)  # fmt: skip
def paged_decode_kernel(
    # tensors, each followed by its strides in elements
    p_q, stride_qs, stride_qh, stride_qd,  # [num_seqs, num_q_heads, head_size]
    p_k, stride_kb, stride_kt, stride_kh, stride_kdo, stride_kx,  # see paged_walk
    p_v, stride_vb, stride_vt, stride_vh, stride_vd,
    p_table, stride_table_s, stride_page,  # [num_seqs, max_blocks_per_seq]
    p_seq_lens, stride_len,  # [num_seqs]
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
    X: tl.constexpr,  # innermost K elements of the packed layout, otherwise 1
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
    m_d = o_d < head_size
    m_dv = o_dv < v_head_size

    p_q += i_seq * stride_qs + i_head * stride_qh
    seq_len = tl.load(p_seq_lens + i_seq * stride_len)
    b_q = tl.load(p_q + o_d * stride_qd, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK_D]

    slope = tl.load(p_slopes + i_head * stride_slope) if p_slopes is not None else None
    if p_k_scale is not None:
        scale *= tl.load(p_k_scale + i_kv_head * stride_k_scale)
    row_max, exp_sum, acc = attend_pages(
        b_q, p_k + i_kv_head * stride_kh, stride_kb, stride_kt, stride_kdo, stride_kx,
        p_v + i_kv_head * stride_vh, stride_vb, stride_vt, stride_vd, p_table + i_seq * stride_table_s, stride_page,
        0, seq_len, scale, block_size, o_d, m_d, o_dv, m_dv, seq_len - 1, window, soft_cap, slope, X, TILE, BLOCK_DV,
    )  # fmt: skip
    if p_k_scale is not None:
        acc *= tl.load(p_v_scale + i_kv_head * stride_v_scale)

    if p_sinks is not None:
        sink = tl.load(p_sinks + i_head * stride_sink)
        row_max, exp_sum, acc = add_sink(row_max, exp_sum, acc, sink)

    p_out += i_seq * stride_os + i_head * stride_oh
    p_lse += i_seq * stride_lse_s + i_head * stride_lse_h
    store_state(p_out, p_lse, o_dv, m_dv, stride_od, row_max, exp_sum, acc)
