"""``latent_decode`` for Hopper with 64 query heads a program: warps that load, warps that weigh, warps that sum up.

In ``latent_hopper`` all warps of a program do one thing after the other, and matrix units wait while weights are made.
Here three groups of warps go their own ways, and each leaves for the next what that needs in shared memory:

- four warps copy tiles of 64 tokens, each as soon as its buffer is free;
- four warps, which have the queries, make scores of a tile, S = Q Kᵀ [64, 64], and of these weights P. They leave P
  where the rotary parts of the keys were, which nobody else needs;
- eight warps add P V to an accumulator [64, 512], of which each has 16 rows and half of the columns.

So values of a tile are multiplied while the next one's scores and weights are made. There are two buffers of a tile,
with three mbarriers each: ``full`` says that the copy is done, ``ready`` that the weights are there too, ``free`` that
the product with the values is done. All go through the tiles of the program's range in one order, across the ends of
sequences: a sequence's result is stored while tiles of the next one are loaded and weighed.

Products and copies of a tile take the bandwidth of shared memory for 2,400 cycles, counted by their bytes, and matrix
units for 2,200. Tiles of 32 tokens in four buffers are there long before they are wanted, but take shared memory for
2,900, since the queries are read for each: they were slower on an H200.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# Device code has no Python types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy as cp
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnfuzz.kernels.latent.latent_hopper import (
    _RANK,
    _ROPE,
    _TILE,
    _add,
    _barrier,
    _begin_copy,
    _count_tiles,
    _load_pages,
)

__all__ = ["latent_warps_kernel"]

_HEADS, _BUFFERS = gl.constexpr(64), gl.constexpr(2)
_SUMMING, _SCORING, _LOADING = gl.constexpr(8), gl.constexpr(4), gl.constexpr(4)  # warps
# Of a thread; those that sum up get the rest, 176. ptxas takes no product of more than 128 columns where threads begin
# with 128 registers, as those of 16 warps do.
_SCORING_REGISTERS, _LOADING_REGISTERS = gl.constexpr(112), gl.constexpr(48)


@gluon.jit
def _find_range(p_seq_lens, num_seqs, num_splits, i_split, BLOCK_S: gl.constexpr, LAYOUT: gl.constexpr):
    """As ``combine_partials.find_range``, unless ranges that lie within a sequence each are hardly longer.

    A range with parts of two sequences loads the queries of both, and what it has of either is to be combined. So where
    no piece is more than two tiles above the mean, sequences are cut into as many pieces each, and ``ranges`` is
    minus that number.
    """
    o_s = gl.arange(0, BLOCK_S, layout=LAYOUT)
    m_s = o_s < num_seqs
    b_len = gl.load(p_seq_lens + o_s, mask=m_s, other=0).to(gl.int32)
    tiles = gl.where(m_s, _count_tiles(b_len), 0)
    ends = gl.associative_scan(tiles, 0, _add)
    total = gl.sum(tiles, axis=0)
    ranges = gl.minimum(num_splits, total)
    first = (total.to(gl.int64) * i_split // ranges).to(gl.int32)
    last = (total.to(gl.int64) * (i_split + 1) // ranges).to(gl.int32)
    last = gl.where(i_split < ranges, last, first)
    m_before = ends <= first
    i_seq = gl.sum(m_before.to(gl.int32), axis=0)
    seq_begin = gl.max(gl.where(m_before, ends, 0), axis=0)
    pieces = num_splits // num_seqs
    longest = (gl.max(tiles, axis=0) + pieces - 1) // gl.maximum(pieces, 1)
    if (pieces > 0) & (longest <= (total + num_splits - 1) // num_splits + 2):
        ranges = -pieces
        i_seq = gl.minimum(i_split // gl.maximum(pieces, 1), num_seqs - 1)
        m_before = o_s < i_seq
        seq_begin = gl.sum(gl.where(m_before, tiles, 0), axis=0)
        seq_end = gl.sum(gl.where(o_s <= i_seq, tiles, 0), axis=0)
        piece = _piece(seq_begin, seq_end, pieces)
        first = gl.minimum(seq_begin + (i_split - i_seq * pieces) * piece, seq_end)
        last = gl.minimum(first + piece, seq_end)
    return first, last, total, ranges, i_seq, seq_begin


@gluon.jit
def _piece(seq_begin, seq_end, pieces):
    """Tiles of each piece of a sequence, but for the last one."""
    return (seq_end - seq_begin + pieces - 1) // gl.maximum(pieces, 1)


@gluon.jit
def _load_queries(p_q, stride_qs, stride_qh, i_seq, first_head, num_q_heads, s_q, s_q_rope):
    """Queries of a sequence on their way, by the warps that make scores; a thread has four rows."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_SCORING, 1], [1, 0])
    i_head = first_head + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, LAYOUT))
    m_head = (i_head < num_q_heads)[:, None]
    p_rows = p_q + i_seq.to(gl.int64) * stride_qs + (i_head * stride_qh)[:, None]
    o_c = gl.arange(0, _RANK, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    cp.async_copy_global_to_shared(s_q, p_rows + o_c, mask=m_head)
    o_c = _RANK + gl.arange(0, _ROPE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    cp.async_copy_global_to_shared(s_q_rope, p_rows + o_c, mask=m_head)
    cp.commit_group()


@gluon.jit
def _splits(i_seq, seq_begin, seq_end, ranges, total):
    """The first range of a sequence and how many it has, as ``splits_of_range``, or its pieces."""
    first = (((seq_begin + 1).to(gl.int64) * ranges - 1) // total).to(gl.int32)
    count = ((seq_end.to(gl.int64) * ranges - 1) // total).to(gl.int32) - first + 1
    if ranges < 0:
        piece = _piece(seq_begin, seq_end, -ranges)
        first = i_seq * -ranges
        count = (seq_end - seq_begin + piece - 1) // piece
    return first, count


@gluon.jit
def _begin_scores(i, s_q, s_q_rope, s_latent, s_rope, full):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE, 16])
    buffer = i % _BUFFERS
    mbarrier.wait(full.index(buffer), i // _BUFFERS & 1)
    fence_async_shared()
    zeros = gl.full([_HEADS, _TILE], 0.0, gl.float32, layout=SCORES)
    b_s = warpgroup_mma(s_q, s_latent.index(buffer).permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma(s_q_rope, s_rope.index(buffer).permute((1, 0)), b_s, is_async=True)


@gluon.jit
def _weigh(
    b_s, i, i_tile, row_max, scale, seq_len, s_rope, s_alpha, LAST: gl.constexpr,
):  # fmt: skip
    """Weights of a tile, and the factor of what those who sum up have; both are also left for them."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE, 16])
    buffer = i % _BUFFERS
    b_s = b_s * scale
    if LAST:  # others are full of tokens
        o_t = gl.arange(0, _TILE, layout=gl.SliceLayout(0, SCORES))[None, :]
        b_s = gl.where(i_tile * _TILE + o_t < seq_len, b_s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(b_s, axis=1))
    ref = gl.where(new_max == float("-inf"), 0.0, new_max)
    alpha = gl.exp2(row_max - ref)
    b_w = gl.exp2(b_s - ref[:, None])
    _barrier()  # until all warps have their scores
    s_rope.index(buffer).store(b_w.to(s_rope.dtype))
    s_alpha.index(buffer).store(alpha)
    return b_w, alpha, new_max


@gluon.jit
def _tell(i, ready):
    fence_async_shared()
    _barrier()
    mbarrier.arrive(ready.index(i % _BUFFERS), count=1)


@gluon.jit
def _score(
    p_q, stride_qs, stride_qh, p_seq_lens, p_lse, stride_lse_s, stride_lse_h, p_partial_max, p_partial_sum, scale,
    num_seqs, num_splits, first_head, num_q_heads, tile, last, total, ranges, i_seq, seq_begin,
    s_q, s_q_rope, s_latent, s_rope, s_alpha, s_sum, full, ready,
):  # fmt: skip
    """Scores and weights, the maximum of each row and the sum of its weights."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    i = 0
    if tile < last:
        _load_queries(p_q, stride_qs, stride_qh, i_seq, first_head, num_q_heads, s_q, s_q_rope)
    while tile < last:
        seq_len = gl.load(p_seq_lens + i_seq).to(gl.int32)
        seq_end = seq_begin + _count_tiles(seq_len)
        begin = tile - seq_begin
        end = gl.minimum(seq_end, last) - seq_begin
        row_max = gl.full([_HEADS], float("-inf"), gl.float32, layout=ROWS)
        exp_sum = gl.full([_HEADS], 0.0, gl.float32, layout=ROWS)
        cp.wait_group(0)
        _barrier()
        b_next = _begin_scores(i, s_q, s_q_rope, s_latent, s_rope, full)
        b_s = warpgroup_mma_wait(0, deps=[b_next])
        for i_tile in range(begin, end - 1):
            b_w, alpha, row_max = _weigh(b_s, i, i_tile, row_max, scale, seq_len, s_rope, s_alpha, False)
            _tell(i, ready)
            i += 1
            b_next = _begin_scores(i, s_q, s_q_rope, s_latent, s_rope, full)
            exp_sum = exp_sum * alpha + gl.sum(b_w, axis=1)
            b_s = warpgroup_mma_wait(0, deps=[b_next])
        if seq_begin + end < last:
            _barrier()  # until all warps have their scores
            _load_queries(p_q, stride_qs, stride_qh, i_seq + 1, first_head, num_q_heads, s_q, s_q_rope)
        b_w, alpha, row_max = _weigh(b_s, i, end - 1, row_max, scale, seq_len, s_rope, s_alpha, True)
        exp_sum = exp_sum * alpha + gl.sum(b_w, axis=1)
        s_sum.index(i % _BUFFERS).store(exp_sum)
        _tell(i, ready)
        i += 1
        splits_used = _splits(i_seq, seq_begin, seq_end, ranges, total)[1]
        i_head = first_head + gl.arange(0, _HEADS, layout=ROWS)
        m_head = i_head < num_q_heads
        if splits_used == 1:
            divisor = gl.where(exp_sum == 0.0, 1.0, exp_sum)
            p_lses = p_lse + i_seq.to(gl.int64) * stride_lse_s + i_head * stride_lse_h
            gl.store(p_lses, (row_max + gl.log2(divisor)) * 0.6931471805599453, mask=m_head)
        else:
            o_state = i_head * (num_seqs + num_splits) + i_seq + gl.program_id(1)
            gl.store(p_partial_max + o_state, row_max * 0.6931471805599453, mask=m_head)
            gl.store(p_partial_sum + o_state, exp_sum, mask=m_head)
        tile = seq_begin + end
        seq_begin = seq_end
        i_seq += 1


@gluon.jit
def _load(
    p_cache, stride_cb, stride_ct: gl.constexpr, p_table, stride_table_s, block_size, p_seq_lens,
    tile, last, i_seq, seq_begin, s_latent, s_rope, full, free,
    WHOLE_TILES: gl.constexpr,
):  # fmt: skip
    """Copies of tiles, each into the buffer that is free first."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_LOADING, 1], [1, 0])  # a thread has four rows
    i = 0
    while tile < last:
        seq_len = gl.load(p_seq_lens + i_seq).to(gl.int32)
        seq_end = seq_begin + _count_tiles(seq_len)
        begin = tile - seq_begin
        end = gl.minimum(seq_end, last) - seq_begin
        p_pages = p_table + i_seq.to(gl.int64) * stride_table_s
        i_block = _load_pages(p_pages, begin, end, seq_len, block_size, WHOLE_TILES, LAYOUT)
        for i_tile in range(begin, end):
            buffer = i % _BUFFERS
            mbarrier.wait(free.index(buffer), (i // _BUFFERS & 1) ^ 1)
            _begin_copy(
                s_latent.index(buffer), p_cache, stride_cb, stride_ct, i_block, i_tile, end, seq_len, block_size, None,
                0, _RANK, WHOLE_TILES, LAYOUT,
            )  # fmt: skip
            _begin_copy(
                s_rope.index(buffer), p_cache, stride_cb, stride_ct, i_block, i_tile, end, seq_len, block_size, None,
                _RANK, _ROPE, WHOLE_TILES, LAYOUT,
            )  # fmt: skip
            cp.mbarrier_arrive(full.index(buffer), increment_count=False)
            i_block = _load_pages(p_pages, i_tile + 1, end, seq_len, block_size, WHOLE_TILES, LAYOUT)
            i += 1
        tile = seq_begin + end
        seq_begin = seq_end
        i_seq += 1


@gluon.jit
def _sum_up(
    p_seq_lens, p_out, stride_os, stride_oh, p_partial_acc, p_shares,
    num_seqs, num_splits, first_head, num_q_heads, tile, last, total, ranges, i_seq, seq_begin,
    s_latent, s_rope, s_alpha, s_sum, ready, free,
):  # fmt: skip
    """Products of weights and values, and the result of each sequence or of a part of it."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16])
    WIDE: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 256]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 128]],
        block_bases=[],
        shape=[64, 512],
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    i = 0
    while tile < last:
        seq_len = gl.load(p_seq_lens + i_seq).to(gl.int32)
        seq_end = seq_begin + _count_tiles(seq_len)
        begin = tile - seq_begin
        end = gl.minimum(seq_end, last) - seq_begin
        acc = gl.full([_HEADS, _RANK], 0.0, gl.float32, layout=ACC)
        exp_sum = gl.full([_HEADS], 0.0, gl.float32, layout=ROWS)
        for _ in range(begin, end):
            buffer = i % _BUFFERS
            mbarrier.wait(ready.index(buffer), i // _BUFFERS & 1)
            acc = acc * s_alpha.index(buffer).load(ROWS)[:, None]
            fence_async_shared()
            acc = warpgroup_mma(s_rope.index(buffer), s_latent.index(buffer), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            exp_sum = s_sum.index(buffer).load(ROWS)
            _barrier()
            mbarrier.arrive(free.index(buffer), count=1)
            i += 1
        first_split, splits_used = _splits(i_seq, seq_begin, seq_end, ranges, total)
        # For the second kernel, by the program that begins the sequence.
        if (begin == 0) & (gl.program_id(0) == 0):
            gl.store(p_shares + i_seq * 2, i_seq + first_split)
            gl.store(p_shares + i_seq * 2 + 1, splits_used)
        # Eight columns in a row to a thread: four threads have them as the product leaves them, two each.
        i_row = first_head + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, WIDE))
        m_row = (i_row < num_q_heads)[:, None]
        o_r = gl.arange(0, _RANK, layout=gl.SliceLayout(0, WIDE))[None, :]
        if splits_used == 1:
            acc = acc * (1.0 / gl.where(exp_sum == 0.0, 1.0, exp_sum))[:, None]
            b_out = gl.convert_layout(acc.to(p_out.dtype.element_ty), WIDE)
            p_outs = p_out + i_seq.to(gl.int64) * stride_os + (i_row * stride_oh)[:, None] + o_r
            gl.store(p_outs, b_out, mask=m_row)
        else:
            o_state = i_row.to(gl.int64) * (num_seqs + num_splits) + i_seq + gl.program_id(1)
            gl.store(p_partial_acc + (o_state * _RANK)[:, None] + o_r, gl.convert_layout(acc, WIDE), mask=m_row)
        tile = seq_begin + end
        seq_begin = seq_end
        i_seq += 1


@gluon.jit(do_not_specialize=["num_seqs", "num_splits", "num_q_heads", "block_size", "stride_table_s"])
def latent_warps_kernel(
    # tensors, each followed by its strides in elements; last dimensions are contiguous
    p_q, stride_qs, stride_qh,  # [num_seqs, num_q_heads, RANK + ROPE]
    p_cache, stride_cb, stride_ct: gl.constexpr,  # [num_blocks, block_size, RANK + ROPE]
    p_table, stride_table_s,  # [num_seqs, max_blocks_per_seq]
    p_seq_lens,  # [num_seqs]
    p_out, stride_os, stride_oh,  # [num_seqs, num_q_heads, RANK]
    p_lse, stride_lse_s, stride_lse_h,  # [num_seqs, num_q_heads]
    # to be combined, as in grouped_decode
    p_partial_acc,  # [num_q_heads, num_seqs + num_splits, RANK]
    p_partial_max, p_partial_sum,  # without RANK
    p_shares,  # [num_seqs, 2], int32: a sequence's first state and how many it has
    # scalars
    scale,  # times log2(e)
    num_seqs, num_splits, num_q_heads,
    block_size,  # tokens per page
    # constants
    WHOLE_TILES: gl.constexpr,  # whether _TILE divides block_size
    BLOCK_S: gl.constexpr,  # num_seqs rounded up to a power of two
    num_warps: gl.constexpr,  # 8, which sum up
):  # fmt: skip
    """Grid ``cdiv(num_q_heads, 64), num_splits``; launched with programmatic dependent launch."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = p_cache.dtype.element_ty
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    first_head = gl.program_id(0) * _HEADS
    OF_SEQS: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    tile, last, total, ranges, i_seq, seq_begin = _find_range(
        p_seq_lens, num_seqs, num_splits, gl.program_id(1), BLOCK_S, OF_SEQS
    )
    s_q = gl.allocate_shared_memory(dtype, [_HEADS, _RANK], SHARED)
    s_q_rope = gl.allocate_shared_memory(dtype, [_HEADS, _ROPE], SHARED)
    s_latent = gl.allocate_shared_memory(dtype, [_BUFFERS, _TILE, _RANK], SHARED)
    s_rope = gl.allocate_shared_memory(dtype, [_BUFFERS, _TILE, _ROPE], SHARED)
    s_alpha = gl.allocate_shared_memory(gl.float32, [_BUFFERS, _HEADS], PLAIN)
    s_sum = gl.allocate_shared_memory(gl.float32, [_BUFFERS, _HEADS], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [_BUFFERS, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [_BUFFERS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [_BUFFERS, 1], BARRIER)
    for buffer in gl.static_range(_BUFFERS):
        mbarrier.init(full.index(buffer), count=32 * _LOADING)
        mbarrier.init(ready.index(buffer), count=1)
        mbarrier.init(free.index(buffer), count=1)
    fence_async_shared()
    _barrier()
    gl.warp_specialize(
        [
            (_sum_up, (
                p_seq_lens, p_out, stride_os, stride_oh, p_partial_acc, p_shares,
                num_seqs, num_splits, first_head, num_q_heads, tile, last, total, ranges, i_seq, seq_begin,
                s_latent, s_rope, s_alpha, s_sum, ready, free,
            )),
            (_score, (
                p_q, stride_qs, stride_qh,
                p_seq_lens, p_lse, stride_lse_s, stride_lse_h, p_partial_max, p_partial_sum, scale,
                num_seqs, num_splits, first_head, num_q_heads, tile, last, total, ranges, i_seq, seq_begin,
                s_q, s_q_rope, s_latent, s_rope, s_alpha, s_sum, full, ready,
            )),
            (_load, (
                p_cache, stride_cb, stride_ct, p_table, stride_table_s, block_size, p_seq_lens,
                tile, last, i_seq, seq_begin, s_latent, s_rope, full, free, WHOLE_TILES,
            )),
        ],
        [_SCORING, _LOADING],
        [_SCORING_REGISTERS, _LOADING_REGISTERS],
    )  # fmt: skip
    # Not before: programs of the second kernel would take the bandwidth that is needed here.
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
