"""``latent_decode`` for Hopper in Gluon: latent vectors of 512 numbers with 64 of RoPE, at the rate of memory.

Triton's pipeline fills as many buffers as it has stages, and beside the queries there is room for two tiles of 64
tokens. With two it asks for a tile when the one before is used up: nothing is on its way while scores and weights are
made. Gluon says itself when a copy begins: a buffer is filled with the tile after next as soon as the product with its
values is done, and some tile is always on its way.

16 or 32 heads would fill a part of the 64 rows that warp groups multiply, and become columns (64: ``latent_warps``):

    Sᵀ = K Qᵀ  [64, HEADS]       accᵀ = accᵀ · alpha + Vᵀ Pᵀ  [512, HEADS]

The tiles of all sequences are shared out in equal ranges, one for each multiprocessor, as ``grouped_decode`` does it
(``find_range``), and what a range leaves of a sequence is combined by ``combine_partials``.

No interpreter runs Gluon; tests/kernels/gluon_stand_in.py does, in torch. Without a GPU, on others, for other sizes,
strides and with a soft cap ``latent_decode`` is launched.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# Device code has no Python types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy as cp
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

__all__ = ["RANK", "ROPE", "TILE", "latent_hopper_kernel"]

RANK, ROPE, TILE = 512, 64, 64
_RANK, _ROPE, _TILE = gl.constexpr(RANK), gl.constexpr(ROPE), gl.constexpr(TILE)
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # of Triton 3.6, and of later ones


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _count_tiles(seq_len):
    """One at least, with nothing in it, so that somebody stores the result of a sequence without tokens."""
    return gl.maximum((seq_len + _TILE - 1) // _TILE, 1)


@gluon.jit
def _find_range(p_seq_lens, topk, num_seqs, num_splits, i_split, BLOCK_S: gl.constexpr, LAYOUT: gl.constexpr):
    """As ``combine_partials.find_range``; without lengths sequences have ``topk`` tokens each."""
    if p_seq_lens is None:
        each = _count_tiles(topk)
        total = each * num_seqs
    else:
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
    if p_seq_lens is None:
        i_seq = first // each
        seq_begin = i_seq * each
    else:
        m_before = ends <= first
        i_seq = gl.sum(m_before.to(gl.int32), axis=0)
        seq_begin = gl.max(gl.where(m_before, ends, 0), axis=0)
    return first, last, total, ranges, i_seq, seq_begin


@gluon.jit
def _load_slots(p_list, tile, seq_len, OF_TILE: gl.constexpr):
    """Load what a list names, with -1 from its end on ``[TILE]``."""
    i_t = tile * _TILE + gl.arange(0, _TILE, layout=OF_TILE)
    return gl.load(p_list + i_t, mask=i_t < seq_len, other=-1)


@gluon.jit
def _load_pages(p_pages, tile, end, seq_len, block_size, WHOLE_TILES: gl.constexpr, LAYOUT: gl.constexpr):
    """The page of a tile, or of each token ``[TILE]``; none is read where there is no token or from ``end`` on.

    Without a ``block_size`` the slot of each.
    """
    if block_size is None:
        i_block = _load_slots(p_pages, tile, gl.where(tile < end, seq_len, 0), gl.SliceLayout(1, LAYOUT))
    elif WHOLE_TILES:
        m_tile = (tile * _TILE < seq_len) & (tile < end)
        i_block = gl.load(p_pages + tile * _TILE // block_size, mask=m_tile, other=0)
    else:
        i_t = tile * _TILE + gl.arange(0, _TILE, layout=gl.SliceLayout(1, LAYOUT))
        i_block = gl.load(p_pages + i_t // block_size, mask=(i_t < seq_len) & (tile < end), other=0)
    return i_block


@gluon.jit
def _begin_copy(
    s_tile, p_cache, stride_cb, stride_ct: gl.constexpr, i_block, tile, end, seq_len, block_size, num_slots,
    FIRST: gl.constexpr, COLUMNS: gl.constexpr, WHOLE_TILES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Columns of a tile's rows, on their way to ``s_tile``; zeros where there is no token, since 0 · NaN is not 0."""
    o_t = gl.arange(0, _TILE, layout=gl.SliceLayout(1, LAYOUT))
    o_c = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    m_t = tile * _TILE + o_t < gl.where(tile < end, seq_len, 0)
    if block_size is None:
        m_t = (i_block >= 0) & (i_block < num_slots)
        p_rows = p_cache + (i_block.to(gl.int64) * stride_cb)[:, None] + o_c[None, :]
    elif WHOLE_TILES:
        p_page = p_cache + i_block.to(gl.int64) * stride_cb + (tile * _TILE % block_size) * stride_ct
        p_rows = p_page + (o_t * stride_ct)[:, None] + o_c[None, :]
    else:
        o_row = i_block.to(gl.int64) * stride_cb + ((tile * _TILE + o_t) % block_size) * stride_ct
        p_rows = p_cache + o_row[:, None] + o_c[None, :]
    cp.async_copy_global_to_shared(s_tile, p_rows, mask=m_t[:, None])


@gluon.jit(
    do_not_specialize=["num_seqs", "num_splits", "num_q_heads", "block_size", "stride_table_s", "num_slots", "topk"]
)
def latent_hopper_kernel(
    # tensors, each followed by its strides in elements; last dimensions are contiguous
    p_q, stride_qs, stride_qh,  # [num_seqs, num_q_heads, RANK + ROPE]
    p_cache, stride_cb, stride_ct: gl.constexpr,  # [num_blocks, block_size, RANK + ROPE]
    p_table, stride_table_s,  # [num_seqs, max_blocks_per_seq], or lists of slots [num_seqs, topk] without block_size
    p_seq_lens,  # [num_seqs]; None if all places of lists count
    p_out, stride_os, stride_oh,  # [num_seqs, num_q_heads, RANK]
    p_lse, stride_lse_s, stride_lse_h,  # [num_seqs, num_q_heads]
    # to be combined, as in grouped_decode
    p_partial_acc,  # [num_q_heads, num_seqs + num_splits, RANK]
    p_partial_max, p_partial_sum,  # without RANK
    p_shares,  # [num_seqs, 2], int32: a sequence's first state and how many it has
    # scalars
    scale,  # times log2(e)
    num_seqs, num_splits, num_q_heads,
    block_size,  # tokens per page, None where there are lists
    num_slots, topk,  # of the cache, and of a list; None where there are pages
    # constants
    HEADS: gl.constexpr,  # query heads of a program: 16 or 32
    WHOLE_TILES: gl.constexpr,  # whether TILE divides block_size
    BLOCK_S: gl.constexpr,  # num_seqs rounded up to a power of two
    num_warps: gl.constexpr,  # 4, or 8 for 32 heads
):  # fmt: skip
    """Grid ``cdiv(num_q_heads, HEADS), num_splits``; launched with programmatic dependent launch."""
    GROUPS: gl.constexpr = num_warps // 4  # of warps
    LATENT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    TURNED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # A group of warps has all numbers of its heads, of the scores [_TILE, HEADS] and of the accumulator [_RANK, HEADS].
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, HEADS // GROUPS, 16])
    OF_HEADS: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    OF_TOKENS: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    dtype: gl.constexpr = p_cache.dtype.element_ty
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    first_head = gl.program_id(0) * HEADS
    i_split = gl.program_id(1)
    OF_SEQS: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    tile, last, total, ranges, i_seq, seq_begin = _find_range(
        p_seq_lens, topk, num_seqs, num_splits, i_split, BLOCK_S, OF_SEQS
    )
    s_q = gl.allocate_shared_memory(dtype, [HEADS, _RANK], SHARED)
    s_q_rope = gl.allocate_shared_memory(dtype, [HEADS, _ROPE], SHARED)
    s_latent = gl.allocate_shared_memory(dtype, [2, _TILE, _RANK], SHARED)
    s_rope = gl.allocate_shared_memory(dtype, [2, _TILE, _ROPE], SHARED)
    s_w = gl.allocate_shared_memory(dtype, [HEADS, _TILE], SHARED)

    while tile < last:
        seq_len = topk if p_seq_lens is None else gl.load(p_seq_lens + i_seq).to(gl.int32)
        seq_end = seq_begin + _count_tiles(seq_len)
        until = gl.minimum(seq_end, last)
        first_split = (((seq_begin + 1).to(gl.int64) * ranges - 1) // total).to(gl.int32)  # as splits_of_range
        splits_used = ((seq_end.to(gl.int64) * ranges - 1) // total).to(gl.int32) - first_split + 1
        # For the second kernel, by the program that begins the sequence.
        if (tile == seq_begin) & (gl.program_id(0) == 0):
            gl.store(p_shares + i_seq * 2, i_seq + first_split)
            gl.store(p_shares + i_seq * 2 + 1, splits_used)
        p_pages = p_table + i_seq.to(gl.int64) * stride_table_s
        begin = tile - seq_begin
        end = until - seq_begin

        _barrier()  # until all have read the queries of the sequence before
        p_heads = p_q + i_seq.to(gl.int64) * stride_qs
        i_head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, LATENT))
        o_c = gl.arange(0, _RANK, layout=gl.SliceLayout(0, LATENT))
        p_latents = p_heads + (i_head * stride_qh)[:, None] + o_c[None, :]
        cp.async_copy_global_to_shared(s_q, p_latents, mask=(i_head < num_q_heads)[:, None])
        i_head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, TURNED))
        o_c = _RANK + gl.arange(0, _ROPE, layout=gl.SliceLayout(0, TURNED))
        p_ropes = p_heads + (i_head * stride_qh)[:, None] + o_c[None, :]
        cp.async_copy_global_to_shared(s_q_rope, p_ropes, mask=(i_head < num_q_heads)[:, None])
        # Pages are a tile ahead of the copies, which are two tiles ahead of the products.
        i_block = _load_pages(p_pages, begin, end, seq_len, block_size, WHOLE_TILES, LATENT)
        i_turned = _load_pages(p_pages, begin, end, seq_len, block_size, WHOLE_TILES, TURNED)
        for ahead in gl.static_range(2):
            _begin_copy(
                s_latent.index(ahead), p_cache, stride_cb, stride_ct, i_block, begin + ahead, end, seq_len, block_size,
                num_slots, 0, _RANK, WHOLE_TILES, LATENT,
            )  # fmt: skip
            _begin_copy(
                s_rope.index(ahead), p_cache, stride_cb, stride_ct, i_turned, begin + ahead, end, seq_len, block_size,
                num_slots, _RANK, _ROPE, WHOLE_TILES, TURNED,
            )  # fmt: skip
            cp.commit_group()
            i_block = _load_pages(p_pages, begin + ahead + 1, end, seq_len, block_size, WHOLE_TILES, LATENT)
            i_turned = _load_pages(p_pages, begin + ahead + 1, end, seq_len, block_size, WHOLE_TILES, TURNED)

        row_max = gl.full([HEADS], float("-inf"), gl.float32, layout=OF_HEADS)
        o_t = gl.arange(0, _TILE, layout=OF_TOKENS)[:, None]
        zeros = gl.full([_TILE, HEADS], 0.0, gl.float32, layout=PRODUCT)
        acc = gl.full([_RANK, HEADS], 0.0, gl.float32, layout=PRODUCT)
        weights = zeros  # the sum of weights, before it is taken over tokens
        for i_tile in range(begin, end):
            m_t = i_tile * _TILE + o_t < seq_len
            if block_size is None:
                i_slot = _load_slots(p_pages, i_tile, seq_len, OF_TOKENS)
                m_t = ((i_slot >= 0) & (i_slot < num_slots))[:, None]
            latent = s_latent.index((i_tile - begin) & 1)
            rope = s_rope.index((i_tile - begin) & 1)
            cp.wait_group(1)
            fence_async_shared()
            _barrier()
            b_s = warpgroup_mma(latent, s_q.permute((1, 0)), zeros, use_acc=False, is_async=True)
            b_s = warpgroup_mma(rope, s_q_rope.permute((1, 0)), b_s, is_async=True)
            b_s = warpgroup_mma_wait(0, deps=[b_s]) * scale
            b_s = gl.where(m_t, b_s, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(b_s, axis=0))
            ref = gl.where(new_max == float("-inf"), 0.0, new_max)
            alpha = gl.exp2(row_max - ref)
            row_max = new_max
            b_w = gl.exp2(b_s - ref[None, :])
            weights = weights * alpha[None, :] + b_w
            s_w.permute((1, 0)).store(b_w.to(dtype))
            acc = acc * alpha[None, :]
            fence_async_shared()
            _barrier()
            acc = warpgroup_mma(latent.permute((1, 0)), s_w.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _barrier()
            _begin_copy(
                latent, p_cache, stride_cb, stride_ct, i_block, i_tile + 2, end, seq_len, block_size,
                num_slots, 0, _RANK, WHOLE_TILES, LATENT,
            )  # fmt: skip
            _begin_copy(
                rope, p_cache, stride_cb, stride_ct, i_turned, i_tile + 2, end, seq_len, block_size,
                num_slots, _RANK, _ROPE, WHOLE_TILES, TURNED,
            )  # fmt: skip
            cp.commit_group()
            i_block = _load_pages(p_pages, i_tile + 3, end, seq_len, block_size, WHOLE_TILES, LATENT)
            i_turned = _load_pages(p_pages, i_tile + 3, end, seq_len, block_size, WHOLE_TILES, TURNED)
        cp.wait_group(0)

        exp_sum = gl.sum(weights, axis=0)
        i_head = first_head + gl.arange(0, HEADS, layout=OF_HEADS)
        m_head = i_head < num_q_heads
        o_r = gl.arange(0, _RANK, layout=OF_TOKENS)[:, None]
        if splits_used == 1:
            divisor = gl.where(exp_sum == 0.0, 1.0, exp_sum)
            p_outs = p_out + i_seq.to(gl.int64) * stride_os + (i_head * stride_oh)[None, :] + o_r
            gl.store(p_outs, (acc / divisor[None, :]).to(p_out.dtype.element_ty), mask=m_head[None, :])
            p_lses = p_lse + i_seq.to(gl.int64) * stride_lse_s + i_head * stride_lse_h
            gl.store(p_lses, (row_max + gl.log2(divisor)) * 0.6931471805599453, mask=m_head)
        else:
            o_state = i_head.to(gl.int64) * (num_seqs + num_splits) + i_seq + i_split
            gl.store(p_partial_acc + (o_state * _RANK)[None, :] + o_r, acc, mask=m_head[None, :])
            gl.store(p_partial_max + o_state, row_max * 0.6931471805599453, mask=m_head)
            gl.store(p_partial_sum + o_state, exp_sum, mask=m_head)
        tile = until
        seq_begin = seq_end
        i_seq += 1
    # Not before: programs of the second kernel would take the bandwidth that is needed here.
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
