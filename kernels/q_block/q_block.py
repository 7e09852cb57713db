"""Q-Block paged attention: prefill, decode and batches of both, in one launch.

After "The Anatomy of a Triton Attention Kernel" (arXiv 2511.11581), §4.4 to §4.7.

*Q-Blocks.* A program takes ``BLOCK_Q`` neighbouring query tokens of one sequence times the query heads of one KV head,
flattened to ``BLOCK_M`` rows: row ``m`` is token ``m // HEADS`` and head ``m % HEADS``. Each tile of K and V is loaded
once for all of them. Heads that do not divide BLOCK_M leave rows without work, which are masked; a group of more heads
than BLOCK_M is spread over several programs.

*Which sequence?* A sequence of n query tokens has ``ceil(n / BLOCK_Q)`` Q-Blocks, and the sum of these over the
sequences before it would have to be computed, and brought to the device, for every batch. Instead sequence i begins at
block

    start(i) = cu_seqlens_q[i] // BLOCK_Q + i

which needs nothing but what is on the device already (vLLM's unified attention kernel does the same). There is room for
all blocks: with a = cu_seqlens_q[i],  start(i + 1) - start(i) = (a + n) // BLOCK_Q - a // BLOCK_Q + 1, which is at
least n // BLOCK_Q + 1 and so at least ceil(n / BLOCK_Q). ``start`` rises by at least 1 with i, also where n = 0, so
that binary search finds the one sequence with start(i) <= block < start(i + 1). The last one ends at
``num_tokens // BLOCK_Q + num_seqs``, at most num_seqs blocks more than are needed; those have no query and return.

*Segments.* Few sequences do not fill a GPU. A third factor of the grid then cuts the tokens of each Q-Block into
``num_segments`` ranges of whole tiles; each leaves its unnormalised state, and ``reduce_segments`` combines them. How
many there are is known to the host, how long they are only to the device: an empty one leaves an empty state.

*Static grid.* The grid has one program per block, KV head and segment, or (``STATIC``) any number of programs that take
them in turns. The number of blocks comes from the device, so one captured CUDA graph serves every batch that its
tensors have room for, without programs that are launched for nothing.

Blocks are taken from the last to the first: those at the end of a prompt see the most tokens, and the short ones fill
the gaps that are left when they are done.

*Variants* (``score_variants``). A sliding window leaves out the tiles before the first token that the block's first
query sees, and segments cut what is left. The sink of a row is added by the program that finishes it: this one, or the
reduction.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.score_variants import count_sink, window_begin
from attnfuzz.kernels.q_block.q_block_walk import attend_tiles


@triton.jit
def find_sequence(p_cu_seqlens, stride_cu, i_block, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence i with ``start(i) <= i_block < start(i + 1)``, as int64."""
    # start(low) <= i_block, and i_block < start(high) if there is such a block at all
    low = i_block.to(tl.int64) * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(p_cu_seqlens + middle * stride_cu) // BLOCK_Q + middle <= i_block
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low


# No specialisation on what is used once for a block, as a base or a divisor, so that more cases share a compilation.
@triton.jit(
    do_not_specialize=[
        "num_seqs", "num_kv_heads", "num_segments", "block_size", "stride_table_s", "stride_len", "stride_cu",
        "stride_lse_s", "stride_lse_h", "stride_lse_segment", "window", "stride_slope", "stride_sink",
        "stride_k_scale", "stride_v_scale",
    ]
)  # fmt: skip
def q_block_kernel(
    # tensors, each followed by its strides in elements
    p_q, stride_qs, stride_qh, stride_qd,  # [num_tokens, num_q_heads, head_size]
    p_k, stride_kb, stride_kt, stride_kh, stride_kdo, stride_kx,  # see paged_walk
    p_v, stride_vb, stride_vt, stride_vh, stride_vd,
    p_table, stride_table_s, stride_page,  # [num_seqs, max_blocks_per_seq]
    p_seq_lens, stride_len,  # [num_seqs]
    p_cu_seqlens, stride_cu,  # [num_seqs + 1], where each sequence's queries begin in q
    # [num_tokens, num_q_heads, v_head_size]; SEGMENTED: acc, with num_segments before the last axis
    p_out, stride_os, stride_oh, stride_osegment, stride_od,
    # [num_tokens, num_q_heads]; SEGMENTED: row_max in base 2, [num_tokens, num_q_heads, num_segments]
    p_lse, stride_lse_s, stride_lse_h, stride_lse_segment,
    p_exp_sum,  # SEGMENTED: as row_max, with the same strides; otherwise not used
    # scalars
    scale, num_seqs, num_kv_heads, num_segments,
    block_size,  # tokens per page
    head_size, v_head_size,
    # variants (see the wrapper): None unless asked for
    window, soft_cap,
    p_slopes, stride_slope,  # [num_q_heads]
    p_sinks, stride_sink,  # [num_q_heads]; not used if SEGMENTED
    p_k_scale, stride_k_scale,  # [1] or [num_kv_heads], of an 8-bit cache
    p_v_scale, stride_v_scale,
    # constants
    GROUP: tl.constexpr,  # query heads per KV head
    X: tl.constexpr,  # innermost K elements of the packed layout, otherwise 1
    BLOCK_M: tl.constexpr,  # rows of a Q-Block, a power of two of at least 16, as tl.dot wants it
    TILE: tl.constexpr,  # keys per step, likewise
    BLOCK_D: tl.constexpr,  # head_size rounded up, likewise
    BLOCK_DV: tl.constexpr,  # v_head_size rounded up, likewise
    WHOLE_HEAD: tl.constexpr,  # whether BLOCK_D is head_size
    WHOLE_V: tl.constexpr,  # whether BLOCK_DV is v_head_size
    SAME_STRIDES: tl.constexpr,  # whether pages and tokens are as far apart in V as in K, and worth computing once
    BLOCK_SIZE: tl.constexpr,  # block_size if that is to be compiled in, else 0
    SEGMENTED: tl.constexpr,
    STATIC: tl.constexpr,
):  # fmt: skip
    """Grid: one dimension of any size if STATIC, else as many programs as there are blocks x KV heads x segments."""
    HEADS: tl.constexpr = GROUP if GROUP < BLOCK_M else BLOCK_M
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    HEAD_PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    num_tokens = tl.load(p_cu_seqlens + tl.cast(num_seqs, tl.int64) * stride_cu).to(tl.int32)
    num_blocks = num_tokens // BLOCK_Q + num_seqs
    num_work = num_blocks * num_segments * num_kv_heads * tl.cdiv(GROUP, HEADS)
    if tl.program_id(0) >= num_work:
        return
    # One turn without STATIC, and no loop: that would take registers, so that fewer programs ran at once.
    turns = tl.cdiv(num_work - tl.program_id(0), tl.num_programs(0))
    for i_turn in (tl.range if STATIC else tl.static_range)(turns if STATIC else 1):
        i_work = tl.program_id(0) + i_turn * tl.num_programs(0)
        i_block = num_blocks - 1 - i_work % num_blocks
        i_segment = i_work // num_blocks % num_segments
        i_head_part = i_work // num_blocks // num_segments
        i_kv_head = (i_head_part // HEAD_PARTS).to(tl.int64)

        i_seq = find_sequence(p_cu_seqlens, stride_cu, i_block, num_seqs, BLOCK_Q)
        query_start = tl.load(p_cu_seqlens + i_seq * stride_cu).to(tl.int32)
        query_len = tl.load(p_cu_seqlens + (i_seq + 1) * stride_cu).to(tl.int32) - query_start
        first = (i_block - (query_start // BLOCK_Q + i_seq.to(tl.int32))) * BLOCK_Q
        if first < query_len:
            # Query j of n sees what was there before the n, and itself: seq_len - n + j + 1 tokens, and none where that
            # is below 0.
            context_len = tl.load(p_seq_lens + i_seq * stride_len).to(tl.int32) - query_len
            o_m = tl.arange(0, BLOCK_M)
            i_query = first + o_m // HEADS  # [BLOCK_M]
            i_in_group = i_head_part % HEAD_PARTS * HEADS + o_m % HEADS  # [BLOCK_M]
            m_row = (o_m < BLOCK_Q * HEADS) & (i_query < query_len) & (i_in_group < GROUP)
            limits = context_len + i_query + 1
            last_limit = tl.maximum(context_len + tl.minimum(first + BLOCK_Q, query_len), 0)
            first_seen = 0
            first_tile = 0
            if window is not None:
                first_seen = tl.maximum(window_begin(context_len + first, window), 0)
                first_tile = first_seen // TILE * TILE
            per_segment = tl.cdiv(last_limit - first_tile, num_segments * TILE) * TILE
            begin = first_tile + i_segment * per_segment
            end = tl.minimum(begin + per_segment, last_limit)
            end_for_all = begin + tl.maximum(tl.minimum(context_len + first + 1, end) - begin, 0) // TILE * TILE

            o_d = tl.arange(0, BLOCK_D).to(tl.int64)
            o_dv = tl.arange(0, BLOCK_DV).to(tl.int64)
            m_d = o_d < head_size
            m_dv = o_dv < v_head_size
            i_token = (query_start + i_query).to(tl.int64)
            # Not `i_in_group % GROUP`: Triton 3.6 and 3.7 take each remainder of a remainder for a multiple of 16, as
            # the first is, and read q in steps of 16 bytes where heads are not aligned to them.
            i_head = i_kv_head * GROUP + i_in_group
            m_md = m_row[:, None] & m_d[None, :]
            o_q = (i_token * stride_qs + i_head * stride_qh)[:, None] + (o_d * stride_qd)[None, :]
            b_q = tl.load(p_q + o_q, mask=m_md, other=0.0)  # [BLOCK_M, BLOCK_D]

            row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            exp_sum = tl.full([BLOCK_M], 0.0, tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
            p_keys = p_k + i_kv_head * stride_kh
            p_values = p_v + i_kv_head * stride_vh
            p_pages = p_table + i_seq * stride_table_s
            walk_scale = scale if soft_cap is not None or p_slopes is not None else scale * 1.4426950408889634
            if p_k_scale is not None:
                walk_scale *= tl.load(p_k_scale + i_kv_head * stride_k_scale)
            slopes = None
            if p_slopes is not None:
                slopes = tl.load(p_slopes + i_head * stride_slope, mask=m_row, other=0.0)[:, None]  # [BLOCK_M, 1]
            window_for_all = begin
            if window is not None:
                # Tiles from here on lie in the windows of all rows.
                before = window_begin(last_limit - 1, window) - begin
                window_for_all = begin + tl.cdiv(tl.maximum(before, 0), TILE) * TILE
                window_for_all = tl.maximum(begin, tl.minimum(window_for_all, end))
                end_for_all = tl.maximum(window_for_all, end_for_all)
            # Tiles that begin before some row's window; that all rows see whole; that end beyond some row's limit.
            for part in tl.static_range(0 if window is not None else 1, 3):
                row_max, exp_sum, acc = attend_tiles(
                    row_max, exp_sum, acc, b_q, limits, p_keys, stride_kb, stride_kt, stride_kdo, stride_kx,
                    p_values, stride_vb, stride_vt, stride_vd, p_pages, stride_page,
                    begin if part == 0 else (window_for_all if part == 1 else end_for_all),
                    window_for_all if part == 0 else (end_for_all if part == 1 else end),
                    walk_scale, block_size, o_d, m_d, o_dv, m_dv, first_seen, window, soft_cap, slopes,
                    part != 1, WHOLE_HEAD, WHOLE_V, SAME_STRIDES, X, TILE, BLOCK_SIZE,
                )  # fmt: skip

            if p_k_scale is not None:
                acc *= tl.load(p_v_scale + i_kv_head * stride_v_scale)
            i_place = i_segment.to(tl.int64)
            o_lse = i_token * stride_lse_s + i_head * stride_lse_h + i_place * stride_lse_segment  # [BLOCK_M]
            o_out = (i_token * stride_os + i_head * stride_oh + i_place * stride_osegment)[:, None]
            o_out = o_out + (o_dv * stride_od)[None, :]  # [BLOCK_M, BLOCK_DV]
            m_mdv = m_row[:, None] & m_dv[None, :]
            if SEGMENTED:
                # Rows that saw no token say so, and that is all that is read of them.
                tl.store(p_lse + o_lse, row_max, mask=m_row)
                tl.store(p_exp_sum + o_lse, exp_sum, mask=m_row)
                tl.store(p_out + o_out, acc, mask=m_mdv & (exp_sum > 0.0)[:, None])
            else:
                if p_sinks is not None:
                    sinks = tl.load(p_sinks + i_head * stride_sink, mask=m_row, other=0.0)  # [BLOCK_M]
                    row_max, exp_sum, alpha = count_sink(row_max, exp_sum, sinks * 1.4426950408889634, True)
                    acc = acc * alpha[:, None]
                divisor = tl.where(exp_sum == 0.0, 1.0, exp_sum)
                b_out = acc / divisor[:, None]
                tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_mdv)
                tl.store(p_lse + o_lse, (row_max + tl.log2(divisor)) * 0.6931471805599453, mask=m_row)
