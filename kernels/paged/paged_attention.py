"""Naive paged attention of several query tokens per sequence: prefill, decode, and batches that mix both.

The new tokens of sequence s are the rows ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1]`` of q, and their keys are in the
paged cache like all others. Attention is causal: of n query tokens of a sequence of length L, the j-th stands at
position ``L - n + j`` and attends to positions ``[0, L - n + j]``. Keys behind it are there, and not for it. Otherwise
all of them stand where the last one does.

One program per (query token, query head), the prefill kernel of "The Anatomy of a Triton Attention Kernel"
(arXiv 2511.11581, §4.3). The grid knows tokens, not sequences: each program finds the sequence that its token is of by
a binary search in ``cu_seqlens_q``. Every query token reads all of its keys again, for each head of a group, which is
what makes this kernel slow and easy to follow.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.score_variants import add_sink
from attnfuzz.kernels.common.softmax_state import store_state
from attnfuzz.kernels.paged.paged_walk import attend_pages


@triton.jit
def sequence_of_token(p_cu_seqlens, stride_cu, num_seqs, i_token):
    """The sequence with ``cu_seqlens[i] <= i_token < cu_seqlens[i + 1]``, or ``num_seqs`` if no sequence has it.

    A sequence without query tokens has two equal entries and is never found: the search looks for the first entry
    *above* the token, which ends the last sequence that begins at or before it.
    """
    low = num_seqs * 0  # as int as num_seqs is
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        end = tl.load(p_cu_seqlens + (middle + 1).to(tl.int64) * stride_cu)
        above = end > i_token
        low = tl.where(above, low, middle + 1)
        high = tl.where(above, middle, high)
    return low


# As in dense_decode: no specialisation on what only places a base pointer or divides an index.
@triton.jit(
    do_not_specialize=[
        "num_seqs", "group_size", "block_size", "stride_qn", "stride_qh", "stride_table_s", "stride_len", "stride_cu",
        "stride_on", "stride_oh", "stride_lse_n", "stride_lse_h", "window", "stride_slope", "stride_sink",
        "stride_k_scale", "stride_v_scale",
    ]
)  # fmt: skip
def paged_attention_kernel(
    # tensors, each followed by its strides in elements
    p_q, stride_qn, stride_qh, stride_qd,  # [num_tokens, num_q_heads, head_size]
    p_k, stride_kb, stride_kt, stride_kh, stride_kdo, stride_kx,  # see paged_walk
    p_v, stride_vb, stride_vt, stride_vh, stride_vd,
    p_table, stride_table_s, stride_page,  # [num_seqs, max_blocks_per_seq]
    p_seq_lens, stride_len,  # [num_seqs]
    p_cu_seqlens, stride_cu,  # [num_seqs + 1]
    p_out, stride_on, stride_oh, stride_od,  # [num_tokens, num_q_heads, v_head_size]
    p_lse, stride_lse_n, stride_lse_h,  # [num_tokens, num_q_heads]
    # scalars
    scale, num_seqs,
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
    CAUSAL: tl.constexpr,  # otherwise each query token sees what the last one of its sequence does
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
    BLOCK_DV: tl.constexpr,  # v_head_size likewise
):  # fmt: skip
    """Grid ``(num_tokens, num_q_heads)``."""
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    i_kv_head = i_head // group_size
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    o_dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    m_d = o_d < head_size
    m_dv = o_dv < v_head_size

    # q may have more rows than the batch has tokens, as under a captured graph: those come out as empty.
    i_found = sequence_of_token(p_cu_seqlens, stride_cu, num_seqs, i_token)
    m_found = i_found < num_seqs
    i_seq = i_found.to(tl.int64)
    seq_len = tl.load(p_seq_lens + i_seq * stride_len, mask=m_found, other=0).to(tl.int32)
    query_end = tl.load(p_cu_seqlens + (i_seq + 1) * stride_cu, mask=m_found, other=0).to(tl.int32)
    # Counted from the end of both, the token and its key stand at the same place.
    end = tl.where(m_found, seq_len - query_end + tl.program_id(0) + 1, 0)
    if not CAUSAL:
        end = seq_len

    p_q += i_token * stride_qn + i_head * stride_qh
    b_q = tl.load(p_q + o_d * stride_qd, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK_D]

    slope = tl.load(p_slopes + i_head * stride_slope) if p_slopes is not None else None
    if p_k_scale is not None:
        scale *= tl.load(p_k_scale + i_kv_head * stride_k_scale)
    row_max, exp_sum, acc = attend_pages(
        b_q, p_k + i_kv_head * stride_kh, stride_kb, stride_kt, stride_kdo, stride_kx,
        p_v + i_kv_head * stride_vh, stride_vb, stride_vt, stride_vd, p_table + i_seq * stride_table_s, stride_page,
        0, end, scale, block_size, o_d, m_d, o_dv, m_dv, end - 1, window, soft_cap, slope, X, TILE, BLOCK_DV,
    )  # fmt: skip
    if p_k_scale is not None:
        acc *= tl.load(p_v_scale + i_kv_head * stride_v_scale)

    if p_sinks is not None:
        sink = tl.load(p_sinks + i_head * stride_sink)
        row_max, exp_sum, acc = add_sink(row_max, exp_sum, acc, sink)

    p_out += i_token * stride_on + i_head * stride_oh
    p_lse += i_token * stride_lse_n + i_head * stride_lse_h
    store_state(p_out, p_lse, o_dv, m_dv, stride_od, row_max, exp_sum, acc)
