"""``q_block_attention`` for prompts on Hopper in Gluon: products and exponentials at the same time.

A block has 128 rows, query tokens times heads as in ``q_block``, so that a tile of K and V is brought from the second-
level cache for twice the work of 64 rows: at 64 that cache is at its limit before the matrix units are. Triton compiles
it to warp groups that wait for each product, then make weights while no product runs. Here each group has 64 rows to
itself and its own way through the program:

    ask for S of tile j = Q K_jᵀ        ask for acc += P V of tile j - 1
    wait for S        P = exp2(S - max), while the other product runs        wait for acc        acc *= alpha

(FlashAttention-3, arXiv 2407.08608, §3.2). Groups take turns with asking (§3.1), so that while one makes weights the
other's products run. Weights go from registers to the second product and never through memory.

A third group of warps copies: it waits for a buffer that both others have read, fills it with a tile through the block
table, and is ahead of them by as many tiles as there are buffers, across blocks too. That is what the barriers in
shared memory are for: ``k_full`` counts the copying threads whose copies have arrived, ``k_empty`` the groups that have
read. A barrier is in its phases by turns, so a wait names the parity of the one it waits for. Where pages are whole
rows apart one warp is enough, which has the GPU's copy engine (TMA) bring them, and ``k_full`` counts bytes.

Tiles are taken from the last to the first: one that is not seen whole by all rows comes first, and has masks, then come
those without. Programs are as many as multiprocessors and take blocks in turns, the heads of the last block first.

Scores are compared as they are and multiplied by the scale as differences, which are never above 0: see
``q_block_walk`` for what a product that is fused with the subtraction of the maximum may do.

No interpreter runs Gluon; tests/kernels/gluon_stand_in.py does, in torch. What is not launched here (``launch_hopper``)
is launched as on other GPUs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# Device code has no Python types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy as cp
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["ROWS", "q_block_hopper_kernel"]

ROWS = 64
_ROWS = gl.constexpr(ROWS)
_BOX = gl.constexpr(64)  # columns that the swizzle of shared memory takes at once
_CHUNK = gl.constexpr(16)
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # of Triton 3.6, and of later ones


@gluon.jit
def _find_block(
    p_cu_seqlens, p_seq_lens, i_block, num_seqs,
    BLOCK_Q: gl.constexpr, TILE: gl.constexpr, BLOCK_S: gl.constexpr, fewest, num_warps: gl.constexpr,
):  # fmt: skip
    """Finds the sequence i with ``start(i) <= i_block < start(i + 1)`` (see ``q_block``)."""
    # Each warp has all sequences, so that none waits for another.
    OF_SEQS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([BLOCK_S // 32, 1], [32, 1], [1, num_warps], [0, 1]))
    o_s = gl.arange(0, BLOCK_S, layout=OF_SEQS)
    m_s = o_s < num_seqs
    b_start = gl.load(p_cu_seqlens + o_s, mask=m_s, other=0).to(gl.int32)
    m_s = m_s & (b_start // BLOCK_Q + o_s <= i_block)
    i_seq = gl.sum(m_s.to(gl.int32), axis=0) - 1
    query_start = gl.load(p_cu_seqlens + i_seq).to(gl.int32)
    query_len = gl.load(p_cu_seqlens + i_seq + 1).to(gl.int32) - query_start
    context_len = gl.load(p_seq_lens + i_seq).to(gl.int32) - query_len
    first = (i_block - query_start // BLOCK_Q - i_seq) * BLOCK_Q
    last_limit = gl.maximum(context_len + gl.minimum(first + BLOCK_Q, query_len), 0)
    # One tile at least, with nothing in it, where no query sees a key.
    is_mine = (first < query_len) & (query_len >= fewest)
    num_tiles = gl.where(is_mine, gl.maximum((last_limit + TILE - 1) // TILE, 1), 0)
    return i_seq, query_start, query_len, context_len, first, last_limit, num_tiles


@gluon.jit
def _load_ids(
    p_pages, i_t, end, block_size, PAGE: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, CHUNK: gl.constexpr
):
    """Load for each chunk of a tile, from token ``i_t`` on, the page of its tokens, or the pages of each ``[CHUNK]``.

    None is read where there is no token.
    """
    ids = ()
    for i in gl.static_range(TILE // (PAGE if PAGE > 0 else CHUNK)):
        i_first = i_t + i * (PAGE if PAGE > 0 else CHUNK)
        i_page = i_first // BLOCK_SIZE if BLOCK_SIZE > 0 else i_first // block_size
        b_ids = gl.load(p_pages + i_page, mask=(i_first < end) & (i_first >= 0), other=0)
        ids = ids + (b_ids,)  # type: ignore[assignment]  # noqa: RUF005 - Gluon unpacks no tuple, and lets it grow
    return ids


@gluon.jit
def _begin_copy(
    s_tile, p_rows, stride_b, stride_t, ids, start, o_t, end, block_size,
    PAGE: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, CHUNK: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """A tile on its way to ``s_tile``; zeros where there is no token, since 0 · NaN is not 0.

    ``p_rows [CHUNK, HEAD_SIZE]``: of the first tokens of a page, or if these look for themselves of the first of all.
    """
    for i in gl.static_range(TILE // CHUNK):
        if PAGE > 0:
            i_off = start % BLOCK_SIZE + i * CHUNK % PAGE
            p_chunk = p_rows + (ids[i * CHUNK // PAGE].to(gl.int64) * stride_b + i_off.to(gl.int64) * stride_t)
        else:
            i_t = start + i * CHUNK + o_t
            i_off = i_t % BLOCK_SIZE if BLOCK_SIZE > 0 else i_t % block_size
            p_chunk = p_rows + (ids[i].to(gl.int64) * stride_b + i_off.to(gl.int64) * stride_t)[:, None]
        if MASKED:
            m_t = start + i * CHUNK + o_t < end
            cp.async_copy_global_to_shared(s_tile.slice(i * CHUNK, CHUNK), p_chunk, mask=m_t[:, None])
        else:
            cp.async_copy_global_to_shared(s_tile.slice(i * CHUNK, CHUNK), p_chunk)


@gluon.jit
def _produce(
    s_q, s_k, s_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    p_q, stride_qs, stride_qh, p_k, stride_kb, stride_kt, stride_kh, p_v, stride_vb, stride_vt, stride_vh,
    p_table, stride_table_s, p_seq_lens, p_cu_seqlens, num_seqs, num_kv_heads, block_size,
    GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, PAGE: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_S: gl.constexpr,
    SAME_STRIDES: gl.constexpr, fewest,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_SIZE, HEAD_SIZE // 8], [4, 1], [1, 0])
    CHUNK: gl.constexpr = 16 if PAGE > 0 else TILE // 4
    BLOCK_Q: gl.constexpr = _ROWS * CONSUMERS // GROUP
    if SAME_STRIDES:  # and computed once
        stride_vb = stride_kb
        stride_vt = stride_kt
    num_blocks = gl.load(p_cu_seqlens + num_seqs).to(gl.int32) // BLOCK_Q + num_seqs
    o_d = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, LAYOUT))
    o_t = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
    begun = 0  # tiles
    blocks_begun = 0
    for i_work in range(gl.program_id(0), num_blocks * num_kv_heads, gl.num_programs(0)):
        i_kv_head = i_work % num_kv_heads
        i_block = num_blocks - 1 - i_work // num_kv_heads
        i_seq, query_start, query_len, context_len, first, _last_limit, num_tiles = _find_block(
            p_cu_seqlens, p_seq_lens, i_block, num_seqs, BLOCK_Q, TILE, BLOCK_S, fewest, 4
        )
        if num_tiles > 0:
            p_pages = p_table + i_seq.to(gl.int64) * stride_table_s
            p_keys = p_k + i_kv_head.to(gl.int64) * stride_kh + o_d[None, :]
            p_values = p_v + i_kv_head.to(gl.int64) * stride_vh + o_d[None, :]
            if PAGE > 0:
                p_keys = p_keys + (o_t * stride_kt)[:, None]
                p_values = p_values + (o_t * stride_vt)[:, None]
            o_id = 0 if PAGE > 0 else o_t
            end = context_len + query_len
            start = (num_tiles - 1) * TILE
            ids = _load_ids(p_pages, start + o_id, end, block_size, PAGE, BLOCK_SIZE, TILE, CHUNK)

            mbarrier.wait(q_empty, (blocks_begun & 1) ^ 1)
            for i in gl.static_range(CONSUMERS):
                o_m = i * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT))
                i_query = first + o_m // GROUP
                m_row = (o_m < BLOCK_Q * GROUP) & (i_query < query_len)
                i_head = i_kv_head * GROUP + o_m % GROUP
                o_q = (query_start + i_query).to(gl.int64) * stride_qs + i_head.to(gl.int64) * stride_qh
                cp.async_copy_global_to_shared(s_q.index(i), p_q + o_q[:, None] + o_d[None, :], mask=m_row[:, None])
            cp.mbarrier_arrive(q_full, increment_count=False)
            blocks_begun += 1

            for part in gl.static_range(2):
                # The last tile, which comes first, may have rows without a token.
                for i in range(0 if part == 0 else 1, 1 if part == 0 else num_tiles):
                    start = (num_tiles - 1 - i) * TILE
                    stage = begun % STAGES
                    phase = (begun // STAGES & 1) ^ 1
                    mbarrier.wait(k_empty.index(stage), phase)
                    _begin_copy(
                        s_k.index(stage), p_keys, stride_kb, stride_kt, ids, start, o_t, end, block_size,
                        PAGE, BLOCK_SIZE, TILE, CHUNK, part == 0,
                    )  # fmt: skip
                    cp.mbarrier_arrive(k_full.index(stage), increment_count=False)
                    mbarrier.wait(v_empty.index(stage), phase)
                    _begin_copy(
                        s_v.index(stage), p_values, stride_vb, stride_vt, ids, start, o_t, end, block_size,
                        PAGE, BLOCK_SIZE, TILE, CHUNK, part == 0,
                    )  # fmt: skip
                    cp.mbarrier_arrive(v_full.index(stage), increment_count=False)
                    begun += 1
                    # There when a buffer is free for the next tile.
                    ids = _load_ids(p_pages, start - TILE + o_id, end, block_size, PAGE, BLOCK_SIZE, TILE, CHUNK)


@gluon.jit
def _ask_for_boxes(
    d_cache, full, s_boxes, first_box, ids, start, end, row, col, rows_b,
    PAGE: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, HALVES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """A tile by TMA, in boxes ``[PAGE, 64]``: zeros without a token, which is before the first row, none in part."""
    for i in gl.static_range(TILE // PAGE):
        i_row = ids[i] * rows_b + row + start % BLOCK_SIZE + i * PAGE % BLOCK_SIZE
        is_whole = True
        if MASKED:
            left = end - (start + i * PAGE)
            i_row = gl.where(left >= PAGE, i_row, -PAGE)
            is_whole = (left <= 0) | (left >= PAGE)
        for half in gl.static_range(HALVES):
            s_box = s_boxes.index(first_box + half * (TILE // PAGE) + i)
            tma.async_copy_global_to_shared(d_cache, [i_row, col + half * _BOX], full, s_box, pred=is_whole)


@gluon.jit
def _copy_last_box(
    p_cache, stride_b, stride_t, s_boxes, first_box, p_pages, start, end,
    PAGE: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, HALVES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The page that has tokens in a part of its rows, with zeros in the others: dead ones may hold NaN."""
    i_box = (end - start) // PAGE
    i_t = start + i_box * PAGE
    p_page = p_cache + gl.load(p_pages + i_t // BLOCK_SIZE).to(gl.int64) * stride_b
    o_t = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, LAYOUT))
    o_d = gl.arange(0, _BOX, layout=gl.SliceLayout(0, LAYOUT))
    for i in gl.static_range(PAGE // _CHUNK):
        i_off = (i_t % BLOCK_SIZE + i * _CHUNK + o_t).to(gl.int64) * stride_t
        m_t = i_t + i * _CHUNK + o_t < end
        for half in gl.static_range(HALVES):
            s_rows = s_boxes.index(first_box + half * (TILE // PAGE) + i_box).slice(i * _CHUNK, _CHUNK)
            p_rows = p_page + i_off[:, None] + (half * _BOX + o_d)[None, :]
            cp.async_copy_global_to_shared(s_rows, p_rows, mask=m_t[:, None])


@gluon.jit
def _begin_tile(
    d_cache, p_cache, stride_b, stride_t, s_boxes, full, stage, p_pages, ids, start, end, row, col, rows_b,
    PAGE: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, HALVES: gl.constexpr, LAYOUT: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = TILE * HALVES * _BOX * 2
    OF_A_PAGE: gl.constexpr = PAGE * HALVES * _BOX * 2
    first_box = stage * (HALVES * (TILE // PAGE))
    if MASKED:
        is_partial = (end - start < TILE) & ((end - start) % PAGE > 0)
        mbarrier.expect(full, BYTES, pred=is_partial == False)  # noqa: E712 - of a tensor
        _ask_for_boxes(
            d_cache, full, s_boxes, first_box, ids, start, end, row, col, rows_b,
            PAGE, BLOCK_SIZE, TILE, HALVES, True,
        )  # fmt: skip
        if is_partial:
            _copy_last_box(
                p_cache, stride_b, stride_t, s_boxes, first_box, p_pages, start, end,
                PAGE, BLOCK_SIZE, TILE, HALVES, LAYOUT,
            )  # fmt: skip
            cp.commit_group()
            cp.wait_group(0)
            fence_async_shared()
            _barrier()
            if BYTES > OF_A_PAGE:
                mbarrier.expect(full, BYTES - OF_A_PAGE)
            else:
                mbarrier.arrive(full, count=1)
    else:
        mbarrier.expect(full, BYTES)
        _ask_for_boxes(
            d_cache, full, s_boxes, first_box, ids, start, end, row, col, rows_b,
            PAGE, BLOCK_SIZE, TILE, HALVES, False,
        )  # fmt: skip


@gluon.jit
def _produce_by_tma(
    s_q, s_k, s_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    p_q, stride_qs, stride_qh, d_k, p_k, d_v, p_v, stride_b, stride_t, stride_h, rows_b, rows_h, columns_h,
    p_table, stride_table_s, p_seq_lens, p_cu_seqlens, num_seqs, num_kv_heads,
    GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, PAGE: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_S: gl.constexpr,
    fewest,
):  # fmt: skip
    """As ``_produce`` by one warp, which asks the GPU's copy engine for pages: few instructions, and no fences."""
    OF_Q: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_SIZE, HEAD_SIZE // 8], [1, 1], [1, 0])
    OF_BOX: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    HALVES: gl.constexpr = HEAD_SIZE // _BOX
    BLOCK_Q: gl.constexpr = _ROWS * CONSUMERS // GROUP
    # Shared memory has all tokens of 64 columns, then those of the next 64.
    boxes_k = s_k._reinterpret(s_k.dtype, [STAGES * HALVES * (TILE // PAGE), PAGE, _BOX], SHARED)
    boxes_v = s_v._reinterpret(s_v.dtype, [STAGES * HALVES * (TILE // PAGE), PAGE, _BOX], SHARED)
    num_blocks = gl.load(p_cu_seqlens + num_seqs).to(gl.int32) // BLOCK_Q + num_seqs
    o_d = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, OF_Q))
    begun = 0  # tiles
    blocks_begun = 0
    for i_work in range(gl.program_id(0), num_blocks * num_kv_heads, gl.num_programs(0)):
        i_kv_head = i_work % num_kv_heads
        i_block = num_blocks - 1 - i_work // num_kv_heads
        i_seq, query_start, query_len, context_len, first, _last_limit, num_tiles = _find_block(
            p_cu_seqlens, p_seq_lens, i_block, num_seqs, BLOCK_Q, TILE, BLOCK_S, fewest, 1
        )
        if num_tiles > 0:
            p_pages = p_table + i_seq.to(gl.int64) * stride_table_s
            p_keys = p_k + i_kv_head.to(gl.int64) * stride_h
            p_values = p_v + i_kv_head.to(gl.int64) * stride_h
            row = i_kv_head * rows_h
            col = i_kv_head * columns_h
            end = context_len + query_len
            start = (num_tiles - 1) * TILE
            ids = _load_ids(p_pages, start, end, BLOCK_SIZE, PAGE, BLOCK_SIZE, TILE, PAGE)

            mbarrier.wait(q_empty, (blocks_begun & 1) ^ 1)
            for i in gl.static_range(CONSUMERS):
                for chunk in gl.static_range(0, _ROWS, _CHUNK):
                    o_m = i * _ROWS + chunk + gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, OF_Q))
                    i_query = first + o_m // GROUP
                    m_row = (o_m < BLOCK_Q * GROUP) & (i_query < query_len)
                    i_head = i_kv_head * GROUP + o_m % GROUP
                    o_q = (query_start + i_query).to(gl.int64) * stride_qs + i_head.to(gl.int64) * stride_qh
                    s_rows = s_q.index(i).slice(chunk, _CHUNK)
                    cp.async_copy_global_to_shared(s_rows, p_q + o_q[:, None] + o_d[None, :], mask=m_row[:, None])
            cp.mbarrier_arrive(q_full, increment_count=False)
            blocks_begun += 1

            for part in gl.static_range(2):
                # The last tile, which comes first, may have rows without a token.
                for i in range(0 if part == 0 else 1, 1 if part == 0 else num_tiles):
                    start = (num_tiles - 1 - i) * TILE
                    stage = begun % STAGES
                    phase = (begun // STAGES & 1) ^ 1
                    mbarrier.wait(k_empty.index(stage), phase)
                    _begin_tile(
                        d_k, p_keys, stride_b, stride_t, boxes_k, k_full.index(stage), stage, p_pages, ids, start,
                        end, row, col, rows_b, PAGE, BLOCK_SIZE, TILE, HALVES, OF_BOX, part == 0,
                    )  # fmt: skip
                    mbarrier.wait(v_empty.index(stage), phase)
                    _begin_tile(
                        d_v, p_values, stride_b, stride_t, boxes_v, v_full.index(stage), stage, p_pages, ids, start,
                        end, row, col, rows_b, PAGE, BLOCK_SIZE, TILE, HALVES, OF_BOX, part == 0,
                    )  # fmt: skip
                    begun += 1
                    # There when a buffer is free for the next tile.
                    ids = _load_ids(p_pages, start - TILE, end, BLOCK_SIZE, PAGE, BLOCK_SIZE, TILE, PAGE)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _weigh(b_s, row_max, exp_sum, tile, limits, scale, TILE: gl.constexpr, SCORES: gl.constexpr, MASKED: gl.constexpr):
    if MASKED:
        o_t = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
        b_s = gl.where(o_t[None, :] < (limits - tile * TILE)[:, None], b_s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(b_s, axis=1))
    ref = gl.where(new_max == float("-inf"), 0.0, new_max)
    alpha = _exp2((row_max - ref) * scale)
    b_p = _exp2((b_s - ref[:, None]) * scale)
    return b_p, new_max, exp_sum * alpha + gl.sum(b_p, axis=1), alpha


@gluon.jit
def _step(
    b_p, acc, row_max, exp_sum, done, tile, limits, scale, q, s_k, s_v, k_full, k_empty, v_full, v_empty, turns,
    WHICH: gl.constexpr, PINGPONG: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
    ACC: gl.constexpr, MASKED: gl.constexpr, BY_TMA: gl.constexpr,
):  # fmt: skip
    """Scores of the tile ``done``, and meanwhile the product of the weights before it with their values."""
    stage = done % STAGES
    before = (done - 1) % STAGES
    mbarrier.wait(v_full.index(before), (done - 1) // STAGES & 1)
    mbarrier.wait(k_full.index(stage), done // STAGES & 1)
    if not BY_TMA:
        fence_async_shared()
    if PINGPONG:
        mbarrier.wait(turns.index(WHICH), (done & 1) ^ (1 - WHICH))
    zeros = gl.full([_ROWS, TILE], 0.0, gl.float32, layout=SCORES)
    b_s = warpgroup_mma(q, s_k.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc = warpgroup_mma(b_p, s_v.index(before), acc, is_async=True)
    if PINGPONG:
        mbarrier.arrive(turns.index(1 - WHICH), count=1)
    b_s = warpgroup_mma_wait(1, deps=[b_s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    weights, row_max, exp_sum, alpha = _weigh(b_s, row_max, exp_sum, tile, limits, scale, TILE, SCORES, MASKED)
    weights = weights.to(s_v.dtype)
    # Weights are made before it is waited for the product: the assembler moves nothing across the loop in which this
    # waits, for what is there already.
    mbarrier.wait(v_full.index(before), (done - 1) // STAGES & 1)
    acc, b_p, weights = warpgroup_mma_wait(0, deps=[acc, b_p, weights])
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
    b_p = gl.convert_layout(weights, gl.DotOperandLayout(0, ACC, 2))
    return b_p, acc, row_max, exp_sum


@gluon.jit
def _consume(
    s_q, s_k, s_v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
    p_seq_lens, p_cu_seqlens, p_out, stride_os, stride_oh, p_lse, stride_lse_s, stride_lse_h,
    scale, num_seqs, num_kv_heads,
    WHICH: gl.constexpr, GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, BLOCK_S: gl.constexpr, PINGPONG: gl.constexpr, fewest, BY_TMA: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_SIZE, HEAD_SIZE // 8], [4, 1], [1, 0])
    BLOCK_Q: gl.constexpr = _ROWS * CONSUMERS // GROUP
    num_blocks = gl.load(p_cu_seqlens + num_seqs).to(gl.int32) // BLOCK_Q + num_seqs
    done = 0  # tiles
    blocks_done = 0
    q = s_q.index(WHICH)
    for i_work in range(gl.program_id(0), num_blocks * num_kv_heads, gl.num_programs(0)):
        i_kv_head = i_work % num_kv_heads
        i_block = num_blocks - 1 - i_work // num_kv_heads
        _i_seq, query_start, query_len, context_len, first, last_limit, num_tiles = _find_block(
            p_cu_seqlens, p_seq_lens, i_block, num_seqs, BLOCK_Q, TILE, BLOCK_S, fewest, 4
        )
        if num_tiles > 0:
            o_m = WHICH * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
            limits = gl.minimum(context_len + first + o_m // GROUP + 1, last_limit)
            # Tiles below this one are seen whole by all rows.
            whole = gl.minimum(gl.maximum(context_len + first + 1, 0) // TILE, num_tiles - 1)
            row_max = gl.full([_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
            exp_sum = gl.full([_ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
            acc = gl.full([_ROWS, HEAD_SIZE], 0.0, gl.float32, layout=ACC)

            mbarrier.wait(q_full, blocks_done & 1)
            mbarrier.wait(k_full.index(done % STAGES), done // STAGES & 1)
            fence_async_shared()
            if PINGPONG:
                mbarrier.wait(turns.index(WHICH), (done & 1) ^ (1 - WHICH))
            zeros = gl.full([_ROWS, TILE], 0.0, gl.float32, layout=SCORES)
            b_s = warpgroup_mma(q, s_k.index(done % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
            if PINGPONG:
                mbarrier.arrive(turns.index(1 - WHICH), count=1)
            b_s = warpgroup_mma_wait(0, deps=[b_s])
            mbarrier.arrive(k_empty.index(done % STAGES), count=1)
            weights, row_max, exp_sum, _alpha = _weigh(
                b_s, row_max, exp_sum, num_tiles - 1, limits, scale, TILE, SCORES, True
            )
            b_p = gl.convert_layout(weights.to(s_v.dtype), WEIGHTS)
            for i in range(1, num_tiles - whole):
                b_p, acc, row_max, exp_sum = _step(
                    b_p, acc, row_max, exp_sum, done + i, num_tiles - 1 - i, limits, scale,
                    q, s_k, s_v, k_full, k_empty, v_full, v_empty, turns, WHICH, PINGPONG,
                    TILE, STAGES, SCORES, ACC, True, BY_TMA,
                )  # fmt: skip
            for i in range(num_tiles - whole, num_tiles):
                b_p, acc, row_max, exp_sum = _step(
                    b_p, acc, row_max, exp_sum, done + i, num_tiles - 1 - i, limits, scale,
                    q, s_k, s_v, k_full, k_empty, v_full, v_empty, turns, WHICH, PINGPONG,
                    TILE, STAGES, SCORES, ACC, False, BY_TMA,
                )  # fmt: skip
            mbarrier.arrive(q_empty, count=1)
            done += num_tiles
            blocks_done += 1
            last = (done - 1) % STAGES
            mbarrier.wait(v_full.index(last), (done - 1) // STAGES & 1)
            if not BY_TMA:
                fence_async_shared()
            acc = warpgroup_mma(b_p, s_v.index(last), acc, is_async=True)
            acc, b_p = warpgroup_mma_wait(0, deps=[acc, b_p])
            mbarrier.arrive(v_empty.index(last), count=1)

            divisor = gl.where(exp_sum == 0.0, 1.0, exp_sum)
            b_out = acc * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, ACC))[:, None]
            b_out = gl.convert_layout(b_out.to(p_out.dtype.element_ty), OUT)
            o_row = WHICH * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, OUT))
            i_query = first + o_row // GROUP
            m_row = (o_row < BLOCK_Q * GROUP) & (i_query < query_len)
            i_head = i_kv_head * GROUP + o_row % GROUP
            o_d = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, OUT))
            o_out = (query_start + i_query).to(gl.int64) * stride_os + i_head.to(gl.int64) * stride_oh
            gl.store(p_out + o_out[:, None] + o_d[None, :], b_out, mask=m_row[:, None])
            i_query = first + o_m // GROUP
            m_row = (o_m < BLOCK_Q * GROUP) & (i_query < query_len)
            i_head = i_kv_head * GROUP + o_m % GROUP
            o_lse = (query_start + i_query).to(gl.int64) * stride_lse_s + i_head.to(gl.int64) * stride_lse_h
            lse = (row_max * scale + gl.log2(divisor)) * 0.6931471805599453
            gl.store(p_lse + o_lse, lse, mask=m_row)


@gluon.jit(
    do_not_specialize=[
        "num_seqs",
        "num_kv_heads",
        "block_size",
        "stride_table_s",
        "stride_lse_s",
        "stride_lse_h",
        "rows_b",
        "rows_h",
        "columns_h",
        "fewest",
    ]
)
def q_block_hopper_kernel(
    # tensors, each followed by its strides in elements; last dimensions are contiguous
    p_q, stride_qs, stride_qh,  # [num_tokens, num_q_heads, HEAD_SIZE]
    p_k, stride_kb, stride_kt, stride_kh,
    p_v, stride_vb, stride_vt, stride_vh,
    p_table, stride_table_s,  # [num_seqs, max_blocks_per_seq]
    p_seq_lens,  # [num_seqs]
    p_cu_seqlens,  # [num_seqs + 1]
    p_out, stride_os, stride_oh,  # [num_tokens, num_q_heads, HEAD_SIZE]
    p_lse, stride_lse_s, stride_lse_h,  # [num_tokens, num_q_heads]
    scale,  # times log2(e)
    num_seqs, num_kv_heads, block_size,
    fewest,  # query tokens of a sequence, or it is left alone
    GROUP: gl.constexpr,  # query heads per KV head
    HEAD_SIZE: gl.constexpr,
    TILE: gl.constexpr,  # keys per step
    STAGES: gl.constexpr,  # tiles of K, and of V, in shared memory
    CONSUMERS: gl.constexpr,  # warp groups of 64 rows each
    PAGE: gl.constexpr,  # tokens of a tile that lie in the same page, if those of each chunk do, else 0
    BLOCK_SIZE: gl.constexpr,  # block_size if that is to be compiled in, else 0
    BLOCK_S: gl.constexpr,  # num_seqs rounded up to a power of two
    SAME_STRIDES: gl.constexpr,  # whether pages and tokens are as far apart in V as in K
    PINGPONG: gl.constexpr,  # whether warp groups take turns with products
    REGISTERS: gl.constexpr, REGISTERS_P: gl.constexpr,
    # BY_TMA: descriptors of the caches as [rows, columns], and where a page, and a head, begins in these
    d_k, d_v, rows_b, rows_h, columns_h,
    BY_TMA: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = p_k.dtype.element_ty
    s_q = gl.allocate_shared_memory(dtype, [CONSUMERS, _ROWS, HEAD_SIZE], SHARED)
    s_k = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_SIZE], SHARED)
    s_v = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_SIZE], SHARED)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    mbarrier.init(q_full, count=32 if BY_TMA else 128)  # threads that copy
    mbarrier.init(q_empty, count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1 if BY_TMA else 128)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1 if BY_TMA else 128)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    if BY_TMA:
        gl.warp_specialize(
            [
                (_consume, (
                    s_q, s_k, s_v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
                    p_seq_lens, p_cu_seqlens, p_out, stride_os, stride_oh, p_lse, stride_lse_s, stride_lse_h,
                    scale, num_seqs, num_kv_heads, gl.constexpr(0), GROUP, HEAD_SIZE, TILE, STAGES, CONSUMERS, BLOCK_S,
                    PINGPONG, fewest, BY_TMA,
                )),
                (_consume, (
                    s_q, s_k, s_v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
                    p_seq_lens, p_cu_seqlens, p_out, stride_os, stride_oh, p_lse, stride_lse_s, stride_lse_h,
                    scale, num_seqs, num_kv_heads, gl.constexpr(1), GROUP, HEAD_SIZE, TILE, STAGES, CONSUMERS, BLOCK_S,
                    PINGPONG, fewest, BY_TMA,
                )),
                (_produce_by_tma, (
                    s_q, s_k, s_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    p_q, stride_qs, stride_qh, d_k, p_k, d_v, p_v, stride_kb, stride_kt, stride_kh,
                    rows_b, rows_h, columns_h,
                    p_table, stride_table_s, p_seq_lens, p_cu_seqlens, num_seqs, num_kv_heads,
                    GROUP, HEAD_SIZE, TILE, STAGES, CONSUMERS, PAGE, BLOCK_SIZE, BLOCK_S, fewest,
                )),
            ],
            [4, 1],
            [REGISTERS, REGISTERS_P],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    s_q, s_k, s_v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
                    p_seq_lens, p_cu_seqlens, p_out, stride_os, stride_oh, p_lse, stride_lse_s, stride_lse_h,
                    scale, num_seqs, num_kv_heads, gl.constexpr(0), GROUP, HEAD_SIZE, TILE, STAGES, CONSUMERS, BLOCK_S,
                    PINGPONG, fewest, BY_TMA,
                )),
                (_consume, (
                    s_q, s_k, s_v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
                    p_seq_lens, p_cu_seqlens, p_out, stride_os, stride_oh, p_lse, stride_lse_s, stride_lse_h,
                    scale, num_seqs, num_kv_heads, gl.constexpr(1), GROUP, HEAD_SIZE, TILE, STAGES, CONSUMERS, BLOCK_S,
                    PINGPONG, fewest, BY_TMA,
                )),
                (_produce, (
                    s_q, s_k, s_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    p_q, stride_qs, stride_qh, p_k, stride_kb, stride_kt, stride_kh,
                    p_v, stride_vb, stride_vt, stride_vh,
                    p_table, stride_table_s, p_seq_lens, p_cu_seqlens, num_seqs, num_kv_heads, block_size,
                    GROUP, HEAD_SIZE, TILE, STAGES, CONSUMERS, PAGE, BLOCK_SIZE, BLOCK_S, SAME_STRIDES,
                    fewest,
                )),
            ],
            [4, 4],
            [REGISTERS, REGISTERS_P],
        )  # fmt: skip
