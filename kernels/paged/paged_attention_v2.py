"""PagedAttention v2: each sequence in partitions of a fixed number of tokens, in parallel, and a second kernel.

Partition ``p`` covers tokens ``[p · n, min((p + 1) · n, seq_len))`` with n = 512 by default. It leaves three things,
for its tokens alone:

    max_logits = max s_i                          exp_sums = Σ exp(s_i - max_logits)
    partial_out = Σ exp(s_i - max_logits) · v_i / exp_sums

and the second kernel puts them together:

    m = max_p max_logits_p       w_p = exp_sums_p · exp(max_logits_p - m)
    out = Σ_p (w_p / Σ w) · partial_out_p        lse = m + log Σ_p w_p

Unlike split-K (``split_decode``), which cuts every sequence into equally many parts, the partitions of a short sequence
are few: it has ``ceil(seq_len / n)``. The grid has as many as a full block table needs, since the host does not know
the lengths; a program beyond the last partition of its sequence returns at once. What it leaves unwritten, the second
kernel does not read. With a sliding window the same holds for partitions before the window.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.score_variants import count_sink, window_begin
from attnfuzz.kernels.paged.paged_attention_walk import attend_packed


# As in dense_decode: no specialisation on what only places a base pointer or divides an index.
@triton.jit(
    do_not_specialize=[
        "group_size", "stride_qs", "stride_qh",
        "stride_kb", "stride_kt", "stride_kh", "stride_kdo", "stride_table_s", "stride_len",
        "stride_logit_s", "stride_logit_h", "stride_ps", "stride_ph", "stride_pp", "stride_stat_s", "stride_stat_h",
        "window", "stride_slope", "stride_k_scale", "stride_v_scale",
    ]
)  # fmt: skip
def paged_attention_v2_kernel(
    # tensors, each followed by its strides in elements
    p_q, stride_qs, stride_qh, stride_qd,  # [num_seqs, num_q_heads, head_size]
    # [num_blocks, num_kv_heads, head_size / X, block_size, X]; all strides but the last in units of ALIGN elements
    p_k, stride_kb, stride_kt, stride_kh, stride_kdo, stride_kx,
    p_v, stride_vb, stride_vt, stride_vh, stride_vd,  # [num_blocks, num_kv_heads, v_head_size, block_size]
    p_table, stride_table_s, stride_page,  # [num_seqs, max_blocks_per_seq]
    p_seq_lens, stride_len,  # [num_seqs]
    # [num_seqs, num_q_heads, max_blocks_per_seq * block_size], room for scores, whose last axis is contiguous
    p_logits, stride_logit_s, stride_logit_h,
    # of each partition, whose softmax is already normalised: [num_seqs, num_q_heads, num_partitions, v_head_size]
    p_partial_out, stride_ps, stride_ph, stride_pp, stride_pd,
    p_max_logits, p_exp_sums, stride_stat_s, stride_stat_h,  # without v_head_size, the last axis contiguous
    # scalars
    scale,
    partition_size,  # tokens
    block_size,  # tokens per page
    group_size,  # query heads per KV head
    head_size, v_head_size,
    # variants (see the wrapper): None unless asked for
    window, soft_cap,
    p_slopes, stride_slope,  # [num_q_heads]
    p_k_scale, stride_k_scale,  # [1] or [num_kv_heads], of an 8-bit cache
    p_v_scale, stride_v_scale,
    # constants
    ALIGN: tl.constexpr,  # elements, a divisor of K's strides but the last
    X: tl.constexpr,  # innermost K elements, a divisor of head_size
    TILE: tl.constexpr,  # keys per step, a power of two, whatever the page size
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
    BLOCK_DV: tl.constexpr,  # v_head_size likewise
):  # fmt: skip
    """Grid ``(num_seqs, num_q_heads, num_partitions)``."""
    i_seq = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    i_part = tl.program_id(2).to(tl.int64)
    i_kv_head = i_head // group_size
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    o_dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    m_d = o_d // X < head_size // X
    m_dv = o_dv < v_head_size

    seq_len = tl.load(p_seq_lens + i_seq * stride_len).to(tl.int32)
    begin = tl.program_id(2) * partition_size
    end = tl.minimum(begin + partition_size, seq_len)
    is_seen = begin < seq_len
    if window is not None:
        is_seen = is_seen & (end > window_begin(seq_len - 1, window))
    if is_seen:
        p_q += i_seq * stride_qs + i_head * stride_qh
        b_q = tl.load(p_q + o_d * stride_qd, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK_D]
        slope = tl.load(p_slopes + i_head * stride_slope) if p_slopes is not None else None
        if p_k_scale is not None:
            scale *= tl.load(p_k_scale + i_kv_head * stride_k_scale)
        qk_max, exp_sum, b_out = attend_packed(
            b_q, p_k + i_kv_head * stride_kh * ALIGN, stride_kb, stride_kt, stride_kdo, stride_kx,
            p_v + i_kv_head * stride_vh, stride_vb, stride_vt, stride_vd, p_table + i_seq * stride_table_s, stride_page,
            p_logits + i_seq * stride_logit_s + i_head * stride_logit_h, begin, end, scale, block_size,
            o_d, m_d, o_dv, m_dv, seq_len - 1, window, soft_cap, slope, ALIGN, X, TILE, BLOCK_DV,
        )  # fmt: skip
        if p_k_scale is not None:
            b_out *= tl.load(p_v_scale + i_kv_head * stride_v_scale)

        p_partial_out += i_seq * stride_ps + i_head * stride_ph + i_part * stride_pp
        tl.store(p_partial_out + o_dv * stride_pd, b_out.to(p_partial_out.dtype.element_ty), mask=m_dv)  # [BLOCK_DV]
        o_stat = i_seq * stride_stat_s + i_head * stride_stat_h + i_part
        tl.store(p_max_logits + o_stat, qk_max)
        tl.store(p_exp_sums + o_stat, exp_sum)


@triton.jit(
    do_not_specialize=[
        "partition_size", "stride_ps", "stride_ph", "stride_pp", "stride_stat_s", "stride_stat_h", "stride_len",
        "stride_os", "stride_oh", "stride_lse_s", "stride_lse_h", "window", "stride_sink",
    ]
)  # fmt: skip
def paged_attention_v2_reduce_kernel(
    # tensors, each followed by its strides in elements
    # of each partition, whose softmax is already normalised: [num_seqs, num_q_heads, num_partitions, v_head_size]
    p_partial_out, stride_ps, stride_ph, stride_pp, stride_pd,
    p_max_logits, p_exp_sums, stride_stat_s, stride_stat_h,  # without v_head_size, the last axis contiguous
    p_seq_lens, stride_len,  # [num_seqs]
    p_out, stride_os, stride_oh, stride_od,  # [num_seqs, num_q_heads, v_head_size]
    p_lse, stride_lse_s, stride_lse_h,  # [num_seqs, num_q_heads]
    p_sinks, stride_sink,  # [num_q_heads], None unless asked for
    # scalars
    partition_size, v_head_size,
    window,  # None unless asked for
    # constants
    CHUNK: tl.constexpr,  # partitions per step, a power of two
    BLOCK_DV: tl.constexpr,  # v_head_size rounded up to a power of two
):  # fmt: skip
    """Grid ``(num_seqs, num_q_heads)``."""
    i_seq = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    o_part = tl.arange(0, CHUNK).to(tl.int64)
    o_d = tl.arange(0, BLOCK_DV).to(tl.int64)
    m_d = o_d < v_head_size
    seq_len = tl.load(p_seq_lens + i_seq * stride_len)
    num_partitions = tl.cdiv(seq_len, partition_size)
    first_partition = 0
    if window is not None:
        first_partition = tl.maximum(window_begin(seq_len - 1, window), 0) // partition_size
    p_partial_out += i_seq * stride_ps + i_head * stride_ph
    p_max_logits += i_seq * stride_stat_s + i_head * stride_stat_h
    p_exp_sums += i_seq * stride_stat_s + i_head * stride_stat_h

    b_max = tl.full([CHUNK], float("-inf"), tl.float32)
    for start in range(first_partition, num_partitions, CHUNK):  # pass 1: the maximum
        i_part = start + o_part
        b_one = tl.load(p_max_logits + i_part, mask=i_part < num_partitions, other=float("-inf"))  # [CHUNK]
        b_max = tl.maximum(b_max, b_one)
    global_max = tl.max(b_max, axis=0)
    ref = tl.where(global_max == float("-inf"), 0.0, global_max)

    b_sum = tl.zeros([CHUNK], tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(first_partition, num_partitions, CHUNK):  # pass 2: the sums
        i_part = start + o_part
        m_part = i_part < num_partitions
        b_one = tl.load(p_max_logits + i_part, mask=m_part, other=float("-inf"))  # [CHUNK]
        b_w = tl.load(p_exp_sums + i_part, mask=m_part, other=0.0) * tl.exp(b_one - ref)  # [CHUNK]
        o_partial = (i_part * stride_pp)[:, None] + (o_d * stride_pd)[None, :]
        b_out = tl.load(p_partial_out + o_partial, mask=m_part[:, None] & m_d[None, :], other=0.0)  # [CHUNK, BLOCK_DV]
        b_sum += b_w
        acc += tl.sum(b_w[:, None] * b_out.to(tl.float32), axis=0)
    exp_sum = tl.sum(b_sum, axis=0)
    if p_sinks is not None:
        sink = tl.load(p_sinks + i_head * stride_sink)
        global_max, exp_sum, alpha = count_sink(global_max, exp_sum, sink, False)
        acc = acc * alpha
    divisor = tl.where(exp_sum == 0.0, 1.0, exp_sum)

    p_out += i_seq * stride_os + i_head * stride_oh
    tl.store(p_out + o_d * stride_od, (acc / divisor).to(p_out.dtype.element_ty), mask=m_d)  # [BLOCK_DV]
    tl.store(p_lse + i_seq * stride_lse_s + i_head * stride_lse_h, global_max + tl.log(divisor))
