"""Partial states of splits, not yet divided, become the result: the second half of ``grouped_decode``.

    M = max_s row_max_s      w_s = exp(row_max_s - M)      out = Σ_s w_s · acc_s / Σ_s w_s · exp_sum_s
    lse = M + log Σ_s w_s · exp_sum_s

Split ``s`` takes tiles ``s, s + num_splits, ...`` from the first one that the query sees, so splits that have a tile
are the first ``min(number of tiles, num_splits)``. The others leave nothing, and nothing of them is read. Where splits
are shared out by length (``find_range``, ``share_splits``), each sequence has a number of its own, which the first half
has noted.

In a batch of prompts and decodes (``p_cu_seqlens``) both halves pass over sequences that have not just one query.

Splits are read a chunk at a time, and the chunks are carried over as an online softmax carries tiles over. Attention
sinks are added here, once for each row (``score_variants``), unless the first half has stored the result.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.score_variants import add_sink, count_sink, window_begin
from attnfuzz.kernels.common.softmax_state import store_state


@triton.jit
def count_splits(seq_len, begin, num_splits, TILE: tl.constexpr):
    """How many splits of the tokens ``[begin, seq_len)`` have a tile."""
    return tl.minimum(tl.cdiv(seq_len - begin, TILE), num_splits)


@triton.jit
def first_tile_begin(seq_len, window, TILE: tl.constexpr):
    """Where the tile begins that holds the first token in the window of a sequence's last one."""
    return tl.maximum(window_begin(seq_len - 1, window), 0) // TILE * TILE


@triton.jit
def has_one_query(p_cu_seqlens, stride_cu, i_seq, m_seq):
    """Whether the queries of each sequence, which begin where ``p_cu_seqlens`` says, are one."""
    p_start = p_cu_seqlens + i_seq.to(tl.int64) * stride_cu
    return tl.load(p_start + stride_cu, mask=m_seq, other=0) - tl.load(p_start, mask=m_seq, other=0) == 1


@triton.jit
def share_splits(p_seq_lens, stride_len, num_seqs, num_splits, window, TILE: tl.constexpr, BLOCK_S: tl.constexpr):
    """Splits of each sequence ``[BLOCK_S]``, together at most ``num_splits``, which is ``2 * num_seqs`` or more.

    With ``n_i = cdiv(tiles_i, c)`` splits of sequence ``i`` none has more than ``c`` tiles. Of eight values from a bit
    above the mean, ``total / num_splits``, to twice that the smallest is taken that does not make too many splits; the
    largest does not, since ``Σ n_i < total / c + num_seqs <= num_splits``. 0 splits beyond the last sequence.
    """
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < num_seqs
    b_len = tl.load(p_seq_lens + o_s.to(tl.int64) * stride_len, mask=m_s, other=0).to(tl.int32)  # [BLOCK_S]
    begin = first_tile_begin(b_len, window, TILE) if window is not None else 0
    # One at least, with nothing in it, so that somebody stores the result of a sequence without tokens.
    tiles = tl.where(m_s, tl.maximum(tl.cdiv(b_len - begin, TILE), 1), 0)
    total = tl.sum(tiles, axis=0).to(tl.int64)
    most = tl.maximum(tl.cdiv(total * (9 + tl.arange(0, 8)), 8 * num_splits), 1).to(tl.int32)  # [8]
    in_all = tl.sum(tl.cdiv(tiles[None, :], most[:, None]), axis=1)
    longest = tl.min(tl.where(in_all <= num_splits, most, tl.max(most, axis=0)), axis=0)
    return tl.cdiv(tiles, longest)


@triton.jit
def find_split(splits, i_split):
    """The sequence of split ``i_split``, its first split and the first of the next; ``splits [BLOCK_S]`` of each.

    The sequence is BLOCK_S where there are fewer splits.
    """
    ends = tl.cumsum(splits, axis=0)
    m_before = ends <= i_split
    i_seq = tl.sum(m_before.to(tl.int32), axis=0)
    first = tl.max(tl.where(m_before, ends, 0), axis=0)
    return i_seq, first, tl.min(tl.where(m_before, 2147483647, ends), axis=0)


@triton.jit
def find_range(
    p_seq_lens, stride_len, p_cu_seqlens, stride_cu, num_seqs, num_splits, i_split, window,
    TILE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Range ``i_split`` of the tiles of all sequences, of which there are ``num_splits``, or as many as tiles.

    Returns its first tile and the one after its last, which are the same if there are fewer ranges, how many tiles and
    ranges there are, the sequence of the first tile and the first tile of that. A sequence without tokens has a tile
    with nothing in it, so that somebody stores its result; one that has not just one query has none.
    """
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < num_seqs
    b_len = tl.load(p_seq_lens + o_s.to(tl.int64) * stride_len, mask=m_s, other=0).to(tl.int32)  # [BLOCK_S]
    begin = first_tile_begin(b_len, window, TILE) if window is not None else 0
    tiles = tl.where(m_s, tl.maximum(tl.cdiv(b_len - begin, TILE), 1), 0)
    if p_cu_seqlens is not None:
        tiles = tl.where(has_one_query(p_cu_seqlens, stride_cu, o_s, m_s), tiles, 0)
    ends = tl.cumsum(tiles, axis=0)
    total = tl.sum(tiles, axis=0)
    ranges = tl.maximum(tl.minimum(num_splits, total), 1)
    first = (total.to(tl.int64) * i_split // ranges).to(tl.int32)
    last = (total.to(tl.int64) * (i_split + 1) // ranges).to(tl.int32)
    last = tl.where(i_split < ranges, last, first)
    m_before = ends <= first
    i_seq = tl.sum(m_before.to(tl.int32), axis=0)
    return first, last, total, ranges, i_seq, tl.max(tl.where(m_before, ends, 0), axis=0)


@triton.jit
def splits_of_range(begin, end, total, ranges):
    """The first of the ranges of ``find_range`` that has one of the tiles ``[begin, end)``, and how many have.

    Range ``p`` begins at ``total * p // ranges``, so tile ``t`` is in the last ``p`` with ``total * p < (t + 1) *
    ranges``.
    """
    first = ((begin + 1).to(tl.int64) * ranges - 1) // total
    last = (end.to(tl.int64) * ranges - 1) // total
    return first.to(tl.int32), (last - first).to(tl.int32) + 1


# As in dense_decode: no specialisation on what only places a base pointer or divides an index.
@triton.jit(
    do_not_specialize=[
        "num_splits", "num_q_heads", "stride_len", "stride_os", "stride_oh", "stride_lse_s", "stride_lse_h",
        "window", "stride_sink", "stride_cu",
    ]
)  # fmt: skip
def combine_partials_kernel(
    # tensors, each followed by its strides in elements
    p_seq_lens, stride_len,  # [num_seqs]; None if all sequences have num_splits
    p_partial_acc,  # [num_seqs, num_q_heads, num_splits, v_head_size], or without num_seqs; float32, contiguous
    p_partial_max, p_partial_sum,  # without v_head_size
    p_shares,  # [num_seqs, 2], int32: a sequence's first split and how many it has; not used unless SHARED_OUT
    p_out, stride_os, stride_oh, stride_od,  # [num_seqs, num_q_heads, v_head_size]
    p_lse, stride_lse_s, stride_lse_h,  # [num_seqs, num_q_heads]
    p_sinks, stride_sink,  # [num_q_heads], None unless asked for
    p_cu_seqlens, stride_cu,  # [num_seqs + 1]; None if sequence i has row i of the results, else where its rows begin
    # scalars
    num_splits, num_q_heads, v_head_size,
    window,  # None unless asked for
    # constants
    TILE: tl.constexpr,  # keys per step of the first half, whose splits are whole tiles
    BLOCK_DV: tl.constexpr,  # columns of a program, a power of two
    CHUNK: tl.constexpr,  # splits per step, a power of two
    SHARED_OUT: tl.constexpr,  # whether splits were shared out by length
    PDL: tl.constexpr,  # whether launched with programmatic dependent launch
    HEADS: tl.constexpr,  # of a program, a divisor of num_q_heads
):  # fmt: skip
    """Grid ``num_seqs * num_q_heads / HEADS, cdiv(v_head_size, BLOCK_DV)``."""
    i_seq = (tl.program_id(0) * HEADS // num_q_heads).to(tl.int64)
    i_head = (tl.program_id(0) * HEADS % num_q_heads).to(tl.int64)
    # Before the wait: the first half lets this kernel start only after waiting for what came before, and writes no
    # lengths itself.
    if not SHARED_OUT:
        splits_used = num_splits
        if p_seq_lens is not None:
            seq_len = tl.load(p_seq_lens + i_seq * stride_len).to(tl.int32)
            begin = first_tile_begin(seq_len, window, TILE) if window is not None else 0
            splits_used = count_splits(seq_len, begin, num_splits, TILE)
        o_state = (i_seq * num_q_heads + i_head) * num_splits
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SHARED_OUT:
        if p_cu_seqlens is not None and not has_one_query(p_cu_seqlens, stride_cu, i_seq, True):
            return
        splits_used = tl.load(p_shares + i_seq * 2 + 1)
        o_state = i_head * num_splits + tl.load(p_shares + i_seq * 2)
    if splits_used <= 1:  # stored by the first half
        return

    o_d = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV).to(tl.int64)
    m_d = o_d < v_head_size
    o_split = tl.arange(0, CHUNK)
    for _ in tl.static_range(HEADS):
        row_max = tl.full([], float("-inf"), tl.float32)
        exp_sum = tl.full([], 0.0, tl.float32)
        acc = tl.zeros([BLOCK_DV], tl.float32)
        for start in range(0, splits_used, CHUNK):
            i_s = start + o_split
            m_s = i_s < splits_used
            b_max = tl.load(p_partial_max + o_state + i_s, mask=m_s, other=float("-inf"))  # [CHUNK]
            b_sum = tl.load(p_partial_sum + o_state + i_s, mask=m_s, other=0.0)  # [CHUNK]
            o_acc = (o_state + i_s)[:, None] * v_head_size + o_d[None, :]
            b_acc = tl.load(p_partial_acc + o_acc, mask=m_s[:, None] & m_d[None, :], other=0.0)  # [CHUNK, BLOCK_DV]

            new_max = tl.maximum(row_max, tl.max(b_max, axis=0))
            ref = tl.where(new_max == float("-inf"), 0.0, new_max)
            alpha = tl.exp(row_max - ref)
            b_w = tl.exp(b_max - ref)  # [CHUNK]
            exp_sum = exp_sum * alpha + tl.sum(b_w * b_sum, axis=0)
            acc = acc * alpha + tl.sum(b_w[:, None] * b_acc, axis=0)
            row_max = new_max

        if p_sinks is not None:
            sink = tl.load(p_sinks + i_head * stride_sink)
            row_max, exp_sum, acc = add_sink(row_max, exp_sum, acc, sink)

        i_row = i_seq
        if p_cu_seqlens is not None:
            i_row = tl.load(p_cu_seqlens + i_seq * stride_cu).to(tl.int64)
        p_outs = p_out + i_row * stride_os + i_head * stride_oh
        p_lses = p_lse + i_row * stride_lse_s + i_head * stride_lse_h
        if tl.program_id(1) == 0:
            store_state(p_outs, p_lses, o_d, m_d, stride_od, row_max, exp_sum, acc)
        else:
            store_state(p_outs, None, o_d, m_d, stride_od, row_max, exp_sum, acc)
        o_state += num_splits
        i_head += 1


@triton.jit
def combine_heads(
    p_partial_acc, p_partial_max, p_partial_sum,  # as above
    p_out, stride_oh, stride_od,  # at this sequence
    p_lse, stride_lse_h,
    p_sinks, stride_sink,
    i_head, m_head,  # [BLOCK_G]
    o_state,  # [BLOCK_G], where the states of each head begin
    splits_used,
    v_head_size,
    BLOCK_G: tl.constexpr,  # heads, a power of two
    BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr,  # splits per step, a power of two
):  # fmt: skip
    """Combine several heads at once, by the last of the programs that have just stored the states."""
    o_d = tl.arange(0, BLOCK_DV).to(tl.int64)
    m_d = o_d < v_head_size
    o_split = tl.arange(0, CHUNK)
    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    for start in range(0, splits_used, CHUNK):
        i_s = start + o_split
        m_s = m_head[:, None] & (i_s < splits_used)[None, :]
        o_s = o_state[:, None] + i_s[None, :]
        o_acc = o_s[:, :, None] * v_head_size + o_d[None, None, :]
        m_acc = m_s[:, :, None] & m_d[None, None, :]
        # From the second-level cache: what other programs write does not get into this one's first.
        b_max = tl.load(p_partial_max + o_s, mask=m_s, other=float("-inf"), cache_modifier=".cg")  # [BLOCK_G, CHUNK]
        b_sum = tl.load(p_partial_sum + o_s, mask=m_s, other=0.0, cache_modifier=".cg")  # [BLOCK_G, CHUNK]
        b_acc = tl.load(p_partial_acc + o_acc, mask=m_acc, other=0.0, cache_modifier=".cg")  # [BLOCK_G, CHUNK, DV]

        new_max = tl.maximum(row_max, tl.max(b_max, axis=1))
        ref = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp(row_max - ref)
        b_w = tl.exp(b_max - ref[:, None])  # [BLOCK_G, CHUNK]
        exp_sum = exp_sum * alpha + tl.sum(b_w * b_sum, axis=1)
        acc = acc * alpha[:, None] + tl.sum(b_w[:, :, None] * b_acc, axis=1)
        row_max = new_max

    if p_sinks is not None:
        sinks = tl.load(p_sinks + i_head * stride_sink, mask=m_head, other=0.0)  # [BLOCK_G]
        row_max, exp_sum, alpha = count_sink(row_max, exp_sum, sinks, False)
        acc = acc * alpha[:, None]
    divisor = tl.where(exp_sum == 0.0, 1.0, exp_sum)
    b_out = acc / divisor[:, None]  # [BLOCK_G, BLOCK_DV]
    o_out = i_head[:, None] * stride_oh + o_d[None, :] * stride_od
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_head[:, None] & m_d[None, :])
    tl.store(p_lse + i_head * stride_lse_h, row_max + tl.log(divisor), mask=m_head)
