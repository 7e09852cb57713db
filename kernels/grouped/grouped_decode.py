"""Paged decode attention at the speed of memory: query heads grouped, splits in parallel.

A decode step reads each key and value once and does little with them, so it is as fast as the cache can be read. What
stands between a simple kernel and that:

* The query heads of a group read the same keys. One program takes all heads of a KV head, and both products are matrix
  products (``tl.dot``) whose rows are the heads: K and V are read once instead of ``group_size`` times.
* A few sequences are too few programs for a GPU. Each sequence is split among ``num_splits`` of them (Flash-Decoding).
  Split ``s`` takes tiles ``s, s + num_splits, ...``: its first tile does not depend on the length, so the page ids of
  that tile are on their way while the length is, and a launch that is made for long sequences serves short ones too.
* One long sequence among many short ones has no more splits than they, and the batch waits for it, up to eight times as
  long as its tokens need. The host cannot help, since lengths are on the GPU. With ``BLOCK_S`` each program counts the
  tiles of all sequences first and takes an equal range of them, which may end one sequence and begin the next
  (``find_range``): as many programs as run at once have the same to read, and end together.
* An address in the cache depends on a page id, which is a load of its own. The ids of the next tile are loaded one step
  ahead; otherwise they would take half of the pipeline's stages, and half as much of K and V would be on its way. With
  pages of one token a batch has as many ids as tokens, too many for the cache: ``PREFETCH`` asks for them four
  tiles ahead, so that the load finds them there.
* The second kernel, ``combine_partials``, would be launched when the last program of this one has ended. With
  programmatic dependent launch (PDL) its programs, and those of whatever comes next, take their places as soon as all
  programs of this one have read their tokens, and wait in ``gdc_wait`` for the memory they depend on.
* Even then it costs a microsecond or two, also where no sequence is long enough to need it. With counters in memory
  that the caller has zeroed once (``LAST_COMBINES``) there is no second kernel: each program counts itself when it has
  stored its state, and who finds all others counted combines, and sets the counter back to 0. States are combined in
  the order of the splits, whoever does it.

Variants (``score_variants``): with a sliding window the tiles are counted from the one that holds the first token that
the query sees, so that all splits have work; a sink is added where the result is stored, here or by the second kernel.

Prompts in the same batch (``p_cu_seqlens``) are passed over: their tiles are not counted, ranges are of decodes alone.

The partial state of a split is ``(row_max, exp_sum, acc)`` as in ``softmax_state``, not yet divided. A sequence of one
tile has one split, whose program stores the result itself. Probabilities are rounded to the dtype of q before they
multiply V, and the numbers of an 8-bit cache take that dtype, which holds them exactly; everything else is float32.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.matrix_units import as_operand
from attnfuzz.kernels.common.prefetch import prefetch
from attnfuzz.kernels.common.score_variants import count_sink, vary_scores, window_begin
from attnfuzz.kernels.grouped.combine_partials import (
    combine_heads,
    count_splits,
    find_range,
    first_tile_begin,
    has_one_query,
    splits_of_range,
)

PREFETCHED_TILES: tl.constexpr = tl.constexpr(4)  # ahead


# As in dense_decode: no specialisation on what only places a base pointer or divides an index.
@triton.jit(
    do_not_specialize=[
        "num_seqs", "max_blocks", "num_splits", "num_kv_heads", "group_size", "head_blocks", "block_size", "stride_qs",
        "stride_qh", "stride_table_s", "stride_len", "stride_os", "stride_oh", "stride_lse_s", "stride_lse_h",
        "window", "stride_slope", "stride_sink", "stride_k_scale", "stride_v_scale", "stride_cu",
    ]
)  # fmt: skip
def grouped_decode_kernel(
    # tensors, each followed by its strides in elements
    p_q, stride_qs, stride_qh, stride_qd,  # [num_seqs, num_q_heads, head_size]
    p_k, stride_kb, stride_kt, stride_kh, stride_kdo, stride_kx,  # see paged_walk
    p_v, stride_vb, stride_vt, stride_vh, stride_vd,
    p_table, stride_table_s, stride_page,  # [num_seqs, max_blocks_per_seq]
    p_seq_lens, stride_len,  # [num_seqs]
    p_out, stride_os, stride_oh, stride_od,  # [num_seqs, num_q_heads, v_head_size]
    p_lse, stride_lse_s, stride_lse_h,  # [num_seqs, num_q_heads]
    # to be combined: float32, contiguous; those of splits without tiles are left as they are
    # [num_seqs, num_q_heads, num_splits, v_head_size], or [num_q_heads, num_seqs + num_splits, v_head_size] if BLOCK_S
    p_partial_acc,
    p_partial_max, p_partial_sum,  # without v_head_size
    p_shares,  # [num_seqs, 2], int32: a sequence's first state and how many it has; not used unless BLOCK_S
    p_counters,  # [num_seqs, num_q_heads], int32, 0 before and after; None unless LAST_COMBINES
    # scalars
    scale, num_seqs, num_splits, num_kv_heads,
    group_size,  # query heads per KV head
    head_blocks,  # cdiv(group_size, BLOCK_M)
    block_size,  # tokens per page
    head_size, v_head_size,
    max_blocks,  # entries of a row of the block table
    # variants (see the wrapper): None unless asked for
    window, soft_cap,
    p_slopes, stride_slope,  # [num_q_heads]
    p_sinks, stride_sink,  # [num_q_heads]
    p_k_scale, stride_k_scale,  # [1] or [num_kv_heads], of an 8-bit cache
    p_v_scale, stride_v_scale,
    p_cu_seqlens, stride_cu,  # [num_seqs + 1]; None if sequence i has row i of q and results, else with BLOCK_S
    # constants
    X: tl.constexpr,  # innermost K elements of the packed layout, otherwise 1
    TILE: tl.constexpr,  # keys per step, a power of two, whatever the page size
    BLOCK_M: tl.constexpr,  # query heads of a program: a power of two of at least 16, for tl.dot
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two of at least 16
    BLOCK_DV: tl.constexpr,  # v_head_size likewise
    OWN_V: tl.constexpr,  # whether v_head_size is not head_size: else one mask serves both
    WHOLE_BLOCKS: tl.constexpr,  # whether the head sizes are those of the blocks
    SAME_STRIDES: tl.constexpr,  # whether pages and tokens are as far apart in V as in K
    BLOCK_S: tl.constexpr,  # num_seqs rounded up to a power of two where splits are shared out, otherwise 0
    PREFETCH: tl.constexpr,  # BLOCK_S: whether page ids are asked for tiles ahead, which NVIDIA's GPUs know how to
    PDL: tl.constexpr,  # whether launched with programmatic dependent launch
    LAST_COMBINES: tl.constexpr,  # whether there is no second kernel
    BLOCK_G: tl.constexpr,  # LAST_COMBINES: as BLOCK_M, but no more than the group rounded up to a power of two
    CHUNK: tl.constexpr,  # LAST_COMBINES: splits that are combined in one step, a power of two
):  # fmt: skip
    """Grid ``num_seqs * num_kv_heads * head_blocks, num_splits``, without ``num_seqs`` if splits are shared out.

    So neighbours read the same pages.

    A GPU starts programs one after the other, some 200 in a microsecond. The first splits of all sequences come first:
    they have tokens however short the sequences are.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    i_split = tl.program_id(1)
    o_t = tl.arange(0, TILE)
    if BLOCK_S > 0:
        i_block_of_seq = tl.program_id(0)
        tile, last, total, ranges, i_seq, seq_begin = find_range(
            p_seq_lens, stride_len, p_cu_seqlens, stride_cu, num_seqs, num_splits, i_split, window, TILE, BLOCK_S
        )
        while tile < last:
            i_row = i_seq.to(tl.int64)
            if p_cu_seqlens is not None:
                while not has_one_query(p_cu_seqlens, stride_cu, i_seq, True):
                    i_seq += 1
                i_row = tl.load(p_cu_seqlens + i_seq.to(tl.int64) * stride_cu).to(tl.int64)
            seq_len = tl.load(p_seq_lens + i_seq.to(tl.int64) * stride_len).to(tl.int32)
            begin = first_tile_begin(seq_len, window, TILE) if window is not None else 0
            seq_end = seq_begin + tl.maximum(tl.cdiv(seq_len - begin, TILE), 1)
            until = tl.minimum(seq_end, last)
            first_split, splits_used = splits_of_range(seq_begin, seq_end, total, ranges)
            # For the second kernel, by the program that begins the sequence.
            if (tile == seq_begin) & (i_block_of_seq == 0):
                tl.store(p_shares + i_seq.to(tl.int64) * 2, i_seq + first_split)
                tl.store(p_shares + i_seq.to(tl.int64) * 2 + 1, splits_used)
            start = begin + (tile - seq_begin) * TILE
            i_page = (start + o_t) // block_size
            i_off = start + o_t - i_page * block_size
            p_pages = p_table + i_seq.to(tl.int64) * stride_table_s
            m_page = (start + o_t < seq_len) & (i_page < max_blocks)
            i_block = tl.load(p_pages + i_page.to(tl.int64) * stride_page, mask=m_page, other=0)  # [TILE]
            attend(
                p_q, stride_qs, stride_qh, stride_qd, p_k, stride_kb, stride_kt, stride_kh, stride_kdo, stride_kx,
                p_v, stride_vb, stride_vt, stride_vh, stride_vd, p_pages, stride_page,
                p_out, stride_os, stride_oh, stride_od, p_lse, stride_lse_s, stride_lse_h,
                p_partial_acc, p_partial_max, p_partial_sum, p_counters,
                i_row, i_block_of_seq, i_block, i_page, i_off, start,
                tl.minimum(seq_len, begin + (until - seq_begin) * TILE), TILE, seq_len,
                i_split - first_split, splits_used, i_seq + first_split, num_seqs + num_splits,
                scale, num_kv_heads, group_size, head_blocks, block_size, head_size, v_head_size, window, soft_cap,
                p_slopes, stride_slope, p_sinks, stride_sink, p_k_scale, stride_k_scale, p_v_scale, stride_v_scale,
                X, TILE, BLOCK_M, BLOCK_D, BLOCK_DV, OWN_V, WHOLE_BLOCKS, SAME_STRIDES, True, PREFETCH, False,
                LAST_COMBINES, BLOCK_G, CHUNK,
            )  # fmt: skip
            tile = until
            seq_begin = seq_end
            i_seq += 1
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        return
    i_seq = tl.program_id(0) // (num_kv_heads * head_blocks)
    i_block_of_seq = tl.program_id(0) - i_seq * (num_kv_heads * head_blocks)
    i_seq = i_seq.to(tl.int64)

    p_pages = p_table + i_seq * stride_table_s
    begin = 0
    if window is not None:
        # Unlike without one, the first tile depends on the length.
        seq_len = tl.load(p_seq_lens + i_seq * stride_len).to(tl.int32)
        begin = first_tile_begin(seq_len, window, TILE)
    i_t = begin + i_split * TILE + o_t
    i_page = i_t // block_size
    i_off = i_t - i_page * block_size
    # Within the row, though perhaps past the last page: such an entry is read, but not followed.
    i_block = tl.load(p_pages + i_page.to(tl.int64) * stride_page, mask=i_page < max_blocks, other=0)  # [TILE]
    if window is None:
        seq_len = tl.load(p_seq_lens + i_seq * stride_len).to(tl.int32)
    splits_used = tl.maximum(count_splits(seq_len, begin, num_splits, TILE), 1)
    if i_split >= splits_used:
        return
    attend(
        p_q, stride_qs, stride_qh, stride_qd, p_k, stride_kb, stride_kt, stride_kh, stride_kdo, stride_kx,
        p_v, stride_vb, stride_vt, stride_vh, stride_vd, p_pages, stride_page,
        p_out, stride_os, stride_oh, stride_od, p_lse, stride_lse_s, stride_lse_h,
        p_partial_acc, p_partial_max, p_partial_sum, p_counters,
        i_seq, i_block_of_seq, i_block, i_page, i_off, begin + i_split * TILE, seq_len, num_splits * TILE, seq_len,
        i_split, splits_used, 0, num_splits,
        scale, num_kv_heads, group_size, head_blocks, block_size, head_size, v_head_size, window, soft_cap,
        p_slopes, stride_slope, p_sinks, stride_sink, p_k_scale, stride_k_scale, p_v_scale, stride_v_scale,
        X, TILE, BLOCK_M, BLOCK_D, BLOCK_DV, OWN_V, WHOLE_BLOCKS, SAME_STRIDES, False, False, PDL,
        LAST_COMBINES, BLOCK_G, CHUNK,
    )  # fmt: skip


@triton.jit
def attend(
    p_q, stride_qs, stride_qh, stride_qd, p_k, stride_kb, stride_kt, stride_kh, stride_kdo, stride_kx,
    p_v, stride_vb, stride_vt, stride_vh, stride_vd,
    p_pages, stride_page,  # at this sequence
    p_out, stride_os, stride_oh, stride_od, p_lse, stride_lse_s, stride_lse_h,
    p_partial_acc, p_partial_max, p_partial_sum, p_counters,
    i_seq,  # the row of q and of the results
    i_block_of_seq,
    i_block, i_page, i_off,  # [TILE], of the first tile: pages, which these are of the sequence, places in them
    start_token, stop, step, seq_len,  # a tile from every step-th token on, below stop
    i_split, splits_used,  # of this sequence
    first_split, splits_of_head,  # where its states begin among those of a head, and how many these are
    scale, num_kv_heads, group_size, head_blocks, block_size, head_size, v_head_size, window, soft_cap,
    p_slopes, stride_slope, p_sinks, stride_sink, p_k_scale, stride_k_scale, p_v_scale, stride_v_scale,
    X: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    OWN_V: tl.constexpr, WHOLE_BLOCKS: tl.constexpr, SAME_STRIDES: tl.constexpr,
    SHARED_OUT: tl.constexpr,  # whether a head's states are those of all sequences
    PREFETCH: tl.constexpr, PDL: tl.constexpr, LAST_COMBINES: tl.constexpr, BLOCK_G: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program's tiles of a sequence, and the result, or a state to be combined."""
    i_kv_head = (i_block_of_seq // head_blocks).to(tl.int64)
    i_head_block = i_block_of_seq - i_block_of_seq // head_blocks * head_blocks
    o_t = tl.arange(0, TILE)
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    m_d = o_d < (BLOCK_D if WHOLE_BLOCKS else head_size)  # the former of which the compiler knows to hold
    o_dv = o_d
    m_dv = m_d
    if OWN_V:
        o_dv = tl.arange(0, BLOCK_DV).to(tl.int64)
        m_dv = o_dv < (BLOCK_DV if WHOLE_BLOCKS else v_head_size)
    i_member = i_head_block * BLOCK_M + o_m  # of the group
    m_m = i_member < group_size
    i_head = i_kv_head * group_size + i_member
    m_md = m_m[:, None] & m_d[None, :]
    m_mdv = m_m[:, None] & m_dv[None, :]
    o_q = i_seq * stride_qs + i_head[:, None] * stride_qh + o_d[None, :] * stride_qd
    b_q = tl.load(p_q + o_q, mask=m_md, other=0.0)  # [BLOCK_M, BLOCK_D]

    p_k += i_kv_head * stride_kh
    p_v += i_kv_head * stride_vh
    o_kd = (o_d // X) * stride_kdo + (o_d % X) * stride_kx if X > 1 else o_d * stride_kdo
    o_vd = o_dv * stride_vd

    if p_k_scale is not None:
        scale *= tl.load(p_k_scale + i_kv_head * stride_k_scale)
    slopes = None
    if p_slopes is not None:
        slopes = tl.load(p_slopes + i_head * stride_slope, mask=m_m, other=0.0)[:, None]  # [BLOCK_M, 1]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    step_pages = step // block_size
    step_off = step - step_pages * block_size
    i_last_page = (seq_len - 1) // block_size
    for start in range(start_token, stop, step):
        m_t = start + o_t < seq_len
        if window is not None:
            m_t = m_t & (start + o_t >= window_begin(seq_len - 1, window))
        m_td = m_t[:, None] & m_d[None, :]
        m_tdv = m_t[:, None] & m_dv[None, :]
        o_kt = i_block.to(tl.int64) * stride_kb + i_off.to(tl.int64) * stride_kt
        o_vt = o_kt if SAME_STRIDES else i_block.to(tl.int64) * stride_vb + i_off.to(tl.int64) * stride_vt
        # Dead rows of a page may hold NaN: they are not read, since 0 · NaN is not 0.
        b_k = tl.load(p_k + o_kt[:, None] + o_kd[None, :], mask=m_td, other=0.0)  # [TILE, BLOCK_D]
        b_v = tl.load(p_v + o_vt[:, None] + o_vd[None, :], mask=m_tdv, other=0.0)  # [TILE, BLOCK_DV]
        # A division for each token would be a third of the loop.
        i_off += step_off
        m_next = i_off >= block_size
        i_off = tl.where(m_next, i_off - block_size, i_off)
        i_page += step_pages + m_next.to(tl.int32)
        m_page = start + step + o_t < seq_len
        i_block = tl.load(p_pages + i_page.to(tl.int64) * stride_page, mask=m_page, other=0)  # [TILE]
        if PREFETCH:
            i_ahead = tl.minimum(i_page + PREFETCHED_TILES * step_pages, i_last_page)
            prefetch(p_pages + i_ahead.to(tl.int64) * stride_page)

        b_s = tl.dot(b_q, tl.trans(as_operand(b_k, b_q.dtype))) * scale  # [BLOCK_M, TILE]
        if soft_cap is not None or p_slopes is not None:
            i_key = start + o_t[None, :]
            b_s = vary_scores(b_s, i_key, seq_len - 1, slopes, soft_cap)
        b_s = tl.where(m_t[None, :], b_s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, axis=1))
        ref = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp(row_max - ref)
        b_p = tl.exp(b_s - ref[:, None])  # [BLOCK_M, TILE]
        exp_sum = exp_sum * alpha + tl.sum(b_p, axis=1)
        acc = tl.dot(b_p.to(b_q.dtype), as_operand(b_v, b_q.dtype), acc * alpha[:, None])
        row_max = new_max
    if PDL:
        # Not before: programs of the second kernel would take the places, and the bandwidth, that are needed here.
        tl.extra.cuda.gdc_launch_dependents()
    if p_k_scale is not None:
        acc *= tl.load(p_v_scale + i_kv_head * stride_v_scale)

    p_out += i_seq * stride_os
    p_lse += i_seq * stride_lse_s
    if splits_used == 1:
        if p_sinks is not None:
            sinks = tl.load(p_sinks + i_head * stride_sink, mask=m_m, other=0.0)  # [BLOCK_M]
            row_max, exp_sum, alpha = count_sink(row_max, exp_sum, sinks, False)
            acc = acc * alpha[:, None]
        divisor = tl.where(exp_sum == 0.0, 1.0, exp_sum)
        b_out = acc / divisor[:, None]  # [BLOCK_M, BLOCK_DV]
        o_out = i_head[:, None] * stride_oh + o_dv[None, :] * stride_od
        tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_mdv)
        tl.store(p_lse + i_head * stride_lse_h, row_max + tl.log(divisor), mask=m_m)
    else:
        num_q_heads = num_kv_heads * group_size
        i_row = i_head if SHARED_OUT else i_seq * num_q_heads + i_head
        o_state = i_row * splits_of_head + first_split + i_split  # [BLOCK_M]
        tl.store(p_partial_acc + o_state[:, None] * v_head_size + o_dv[None, :], acc, mask=m_mdv)
        tl.store(p_partial_max + o_state, row_max, mask=m_m)
        tl.store(p_partial_sum + o_state, exp_sum, mask=m_m)
        if LAST_COMBINES:
            # All threads have stored before one of them counts, and its release makes that visible to who acquires.
            tl.debug_barrier()
            # One for each block of heads, of which a sequence has no more than heads.
            p_counter = p_counters + i_seq * num_q_heads + i_block_of_seq
            arrived = tl.atomic_add(p_counter, 1, sem="acq_rel")
            if arrived == splits_used - 1:
                tl.store(p_counter, 0)
                i_in_group = i_head_block * BLOCK_M + tl.arange(0, BLOCK_G)
                i_heads = i_kv_head * group_size + i_in_group
                i_rows = i_heads if SHARED_OUT else i_seq * num_q_heads + i_heads
                combine_heads(
                    p_partial_acc, p_partial_max, p_partial_sum, p_out, stride_oh, stride_od, p_lse, stride_lse_h,
                    p_sinks, stride_sink, i_heads, i_in_group < group_size,
                    i_rows * splits_of_head + first_split, splits_used, v_head_size, BLOCK_G, BLOCK_DV, CHUNK,
                )  # fmt: skip
