"""``grouped_decode`` of 8-bit caches for Hopper in Gluon: half of the bytes in little more than half of the time.

At the rate of an H200's memory a multiprocessor has 55 instructions of each of its four schedulers for a token and KV
head of 256 bytes. Triton's loop has 57, since it reads each number of V by itself from shared memory: matrix units want
the numbers of two tokens beside each other, and no load of its turns numbers of one byte around. This loop has 17:

* V is read in words of two numbers. ``ldmatrix`` turns words around, and what a thread then holds, two words of two
  tokens, is turned into two numbers of each of two dimensions by one ``prmt`` and two conversions. Even and odd
  dimensions are two products, which meet where the result is stored.
* Heads are columns: matrix units multiply 16 rows by 8 columns, and 8 heads or fewer are the usual group.

      Sᵀ = K Qᵀ  [tokens, heads]       accᵀ = accᵀ · alpha + Vᵀ Pᵀ  [head_size, heads]

* Each warp has tokens of its own, an accumulator and a maximum (the first axis of all blocks), so that weights stay in
  the registers they are made in, and no warp waits for another's. They are combined once for a sequence.

A program takes a range of one sequence's tiles, or, with ``BLOCK_S``, a range of all sequences' tiles (``find_range``),
as the Triton kernel does, and ``combine_partials`` combines what ranges leave of a sequence. Numbers and weights take
the dtype of q before they are multiplied; both of float16's 8-bit relatives fit into it, and from there into bfloat16.

No interpreter runs Gluon; tests/kernels/gluon_stand_in.py does, in torch. What this kernel does not know
(``launch_hopper.is_for_hopper``) goes to the one in Triton.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# Device code has no Python types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy as cp
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

__all__ = ["grouped_hopper_kernel"]

_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # of Triton 3.6, and of later ones


def _even_and_odd(kind: str) -> gl.constexpr:
    """Assembly: words of two 8-bit numbers, of two tokens to a register, become the even and the odd ones of both."""
    return gl.constexpr(
        "{ .reg .b32 sorted; .reg .b16 even, odd; prmt.b32 sorted, $2, $2, 0x3120; mov.b32 {even, odd}, sorted; "
        f"cvt.rn.f16x2.{kind}x2 $0, even; cvt.rn.f16x2.{kind}x2 $1, odd; }}"
    )


_OF_E4M3, _OF_E5M2 = map(_even_and_odd, ("e4m3", "e5m2"))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _count_tiles(seq_len, TILE: gl.constexpr):
    """One at least, with nothing in it, so that somebody stores the result of a sequence without tokens."""
    return gl.maximum((seq_len + TILE - 1) // TILE, 1)


@gluon.jit
def _find_range(
    p_seq_lens, num_seqs, num_splits, i_split, TILE: gl.constexpr, BLOCK_S: gl.constexpr, WARPS: gl.constexpr
):
    """As ``combine_partials.find_range``, for as many tiles and splits as have a product of 32 bits."""
    o_s = gl.arange(0, BLOCK_S, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    m_s = o_s < num_seqs
    b_len = gl.load(p_seq_lens + o_s, mask=m_s, other=0).to(gl.int32)  # [BLOCK_S]
    tiles = gl.where(m_s, _count_tiles(b_len, TILE), 0)
    ends = gl.associative_scan(tiles, 0, _add)
    total = gl.sum(tiles, axis=0)
    ranges = gl.minimum(num_splits, total)
    first = total * i_split // ranges
    last = gl.where(i_split < ranges, total * (i_split + 1) // ranges, first)
    m_before = ends <= first
    i_seq = gl.sum(m_before.to(gl.int32), axis=0)
    return first, last, total, ranges, i_seq, gl.max(gl.where(m_before, ends, 0), axis=0)


@gluon.jit
def _tokens_of(tile, WARPS: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """``[WARPS, TOKENS]``, of a tile, in the layout of blocks with a further axis."""
    o_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))) * TOKENS
    o_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return tile * (WARPS * TOKENS) + gl.expand_dims(o_w, 1) + gl.expand_dims(o_t, 0)


@gluon.jit
def _load_pages(
    p_pages, tile, end, seq_len, page_bits, WARPS: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """The page of each token ``[WARPS, TOKENS]``; none is read where there is no token or from ``end`` on."""
    i_t = _tokens_of(tile, WARPS, TOKENS, LAYOUT)
    return gl.load(p_pages + (i_t >> page_bits), mask=i_t < gl.where(tile < end, seq_len, 0), other=0)


@gluon.jit
def _places_of(i_block, stride_b, i_off, stride_t):
    """``i_block * stride_b + i_off * stride_t`` as int64, an instruction each: 64 bits times 64 would be three."""
    o = gl.inline_asm_elementwise(
        "mul.wide.s32 $0, $1, $2;", "=l,r,r", [i_off, stride_t], dtype=gl.int64, is_pure=True, pack=1
    )
    o = gl.inline_asm_elementwise(
        "mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", [i_block, stride_b, o], dtype=gl.int64, is_pure=True, pack=1
    )
    return gl.multiple_of(o, [16, 16])  # as the strides are


@gluon.jit
def _begin_copy(
    s_k, s_v, p_k, stride_kb, stride_kt, p_v, stride_vb, stride_vt, i_block, tile, end, seq_len, page_bits,
    SAME_STRIDES: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Rows of a tile, on their way to ``s_k`` and ``s_v``; zeros where there is no token, since 0 · NaN is not 0."""
    i_t = _tokens_of(tile, WARPS, TOKENS, LAYOUT)
    m_t = gl.expand_dims(i_t < gl.where(tile < end, seq_len, 0), 2)
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    i_off = i_t & ((1 << page_bits) - 1)
    o_kt = _places_of(i_block, stride_kb, i_off, stride_kt)
    o_vt = o_kt if SAME_STRIDES else _places_of(i_block, stride_vb, i_off, stride_vt)
    cp.async_copy_global_to_shared(s_k, p_k + gl.expand_dims(o_kt, 2) + o_d, mask=m_t)  # [WARPS, TOKENS, D]
    cp.async_copy_global_to_shared(s_v, p_v + gl.expand_dims(o_vt, 2) + o_d, mask=m_t)
    cp.commit_group()


@gluon.jit
def _as_operand(x, dtype: gl.constexpr):
    """In the dtype of q, exactly. Hopper converts to float16 at once, and from there to bfloat16 by way of float32."""
    x = x.to(gl.float16)
    if dtype != gl.float16:
        x = x.to(gl.float32).to(dtype)
    return x


@gluon.jit(
    do_not_specialize=[
        "num_seqs", "num_splits", "num_kv_heads", "group_size", "page_bits", "stride_table_s", "stride_lse_s",
        "stride_lse_h", "stride_k_scale", "stride_v_scale",
    ]
)  # fmt: skip
def grouped_hopper_kernel(
    # tensors, each followed by its strides in elements; last dimensions are contiguous
    p_q, stride_qs, stride_qh,  # [num_seqs, num_q_heads, D]
    p_k, stride_kb, stride_kt, stride_kh,  # [num_blocks, block_size, num_kv_heads, D], of 8 bits
    p_v, stride_vb, stride_vt, stride_vh,
    p_table, stride_table_s,  # [num_seqs, max_blocks_per_seq], int32
    p_seq_lens,  # [num_seqs]
    p_out, stride_os, stride_oh,  # [num_seqs, num_q_heads, D]
    p_lse, stride_lse_s, stride_lse_h,  # [num_seqs, num_q_heads]
    p_k_scale, stride_k_scale,  # [1] or [num_kv_heads]
    p_v_scale, stride_v_scale,
    # to be combined, as in grouped_decode
    p_partial_acc,  # [num_q_heads, states, D]; states: num_seqs * num_splits, or with BLOCK_S num_seqs + num_splits
    p_partial_max, p_partial_sum,  # without D
    p_shares,  # [num_seqs, 2], int32: a sequence's first state and how many it has
    # scalars
    scale,  # times log2(e)
    num_seqs, num_splits, num_kv_heads, group_size,
    page_bits,  # of tokens per page, a power of two
    # constants
    D: gl.constexpr,
    SAME_STRIDES: gl.constexpr,  # whether pages and tokens are as far apart in V as in K
    HEADS: gl.constexpr,  # 8 or 16, of which group_size are there
    TOKENS: gl.constexpr,  # of a warp in a tile
    STAGES: gl.constexpr,  # tiles in shared memory
    BLOCK_S: gl.constexpr,  # num_seqs rounded up to a power of two where splits are shared out, otherwise 0
    num_warps: gl.constexpr,
):  # fmt: skip
    """Grid ``num_seqs * num_kv_heads, num_splits``, without ``num_seqs`` if splits are shared out; with PDL."""
    WARPS: gl.constexpr = num_warps
    TILE: gl.constexpr = WARPS * TOKENS
    LOADS: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 512 // D, D // 16], [WARPS, 1, 1], [2, 1, 0])
    BYTES: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [2, 1, 0])
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    OF_Q: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    OF_HEADS: gl.constexpr = gl.SliceLayout(1, MMA)
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [WARPS, 1], [0, 1])
    dtype: gl.constexpr = p_q.dtype.element_ty
    EVEN_AND_ODD: gl.constexpr = _OF_E5M2 if p_v.dtype.element_ty == gl.float8e5 else _OF_E4M3
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    i_kv_head = gl.program_id(0) % num_kv_heads
    i_split = gl.program_id(1)
    if BLOCK_S > 0:
        tile, last, total, ranges, i_seq, seq_begin = _find_range(
            p_seq_lens, num_seqs, num_splits, i_split, TILE, BLOCK_S, WARPS
        )
    else:
        i_seq = gl.program_id(0) // num_kv_heads
        seq_begin = 0
        total = _count_tiles(gl.load(p_seq_lens + i_seq).to(gl.int32), TILE)
        ranges = gl.minimum(num_splits, total)
        tile = total * i_split // ranges
        last = gl.where(i_split < ranges, total * (i_split + 1) // ranges, tile)
    s_k = gl.allocate_shared_memory(p_k.dtype.element_ty, [STAGES, WARPS, TOKENS, D], BYTES)
    s_v = gl.allocate_shared_memory(p_v.dtype.element_ty, [STAGES, WARPS, TOKENS, D], BYTES)
    p_k += i_kv_head.to(gl.int64) * stride_kh
    p_v += i_kv_head.to(gl.int64) * stride_vh
    scale *= gl.load(p_k_scale + i_kv_head * stride_k_scale)
    v_scale = gl.load(p_v_scale + i_kv_head * stride_v_scale)
    i_member = gl.arange(0, HEADS, layout=gl.SliceLayout(0, gl.SliceLayout(1, OF_Q)))
    o_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(1, OF_Q))) * 0  # all have the same queries
    o_d = gl.arange(0, D, layout=gl.SliceLayout(1, gl.SliceLayout(0, OF_Q)))
    o_q = gl.expand_dims(o_w, 1) + gl.expand_dims((i_kv_head * group_size + i_member) * stride_qh, 0)
    o_q = gl.expand_dims(o_q, 1) + gl.expand_dims(gl.expand_dims(o_d, 1), 0)
    m_q = gl.expand_dims(gl.expand_dims(i_member < group_size, 0), 1)
    o_t = gl.expand_dims(_tokens_of(0, WARPS, TOKENS, MMA), 2)

    while tile < last:
        seq_len = gl.load(p_seq_lens + i_seq).to(gl.int32)
        seq_end = seq_begin + _count_tiles(seq_len, TILE)
        until = gl.minimum(seq_end, last)
        if BLOCK_S > 0:
            first_split = ((seq_begin + 1) * ranges - 1) // total  # as splits_of_range
            splits_used = (seq_end * ranges - 1) // total - first_split + 1
            first_state = i_seq + first_split
            states = num_seqs + num_splits
        else:
            first_split = 0
            splits_used = ranges
            first_state = i_seq * num_splits
            states = num_seqs * num_splits
        # For the second kernel, by the program that begins the sequence.
        if (tile == seq_begin) & (i_kv_head == 0):
            gl.store(p_shares + i_seq * 2, first_state)
            gl.store(p_shares + i_seq * 2 + 1, splits_used)
        p_pages = p_table + i_seq.to(gl.int64) * stride_table_s
        begin = tile - seq_begin
        end = until - seq_begin
        _barrier()  # until all have read the tiles of the sequence before
        # Pages are a tile ahead of the copies, which are STAGES - 1 tiles ahead of the products.
        i_block = _load_pages(p_pages, begin, end, seq_len, page_bits, WARPS, TOKENS, LOADS)
        for ahead in gl.static_range(STAGES - 1):
            _begin_copy(
                s_k.index(ahead), s_v.index(ahead), p_k, stride_kb, stride_kt, p_v, stride_vb, stride_vt, i_block,
                begin + ahead, end, seq_len, page_bits, SAME_STRIDES, D, WARPS, TOKENS, LOADS,
            )  # fmt: skip
            i_block = _load_pages(p_pages, begin + ahead + 1, end, seq_len, page_bits, WARPS, TOKENS, LOADS)
        b_q = gl.load(p_q + i_seq.to(gl.int64) * stride_qs + o_q, mask=m_q, other=0.0)  # [WARPS, D, HEADS]
        # An addition, since registers that a load fills together are not those that a product wants together: else each
        # product of the loop would gather them anew.
        b_q = (b_q.to(gl.float32) + 0.0).to(dtype)
        row_max = gl.full([WARPS, HEADS], float("-inf"), gl.float32, layout=OF_HEADS)
        zeros = gl.full([WARPS, TOKENS, HEADS], 0.0, gl.float32, layout=MMA)
        weights = zeros  # the sum of weights, before it is taken over tokens
        even = gl.full([WARPS, D // 2, HEADS], 0.0, gl.float32, layout=MMA)
        odd = even
        slot = 0
        for i_tile in range(begin, end):
            cp.wait_group(STAGES - 2)
            _barrier()
            to = gl.where(slot == 0, STAGES - 1, slot - 1)
            _begin_copy(
                s_k.index(to), s_v.index(to), p_k, stride_kb, stride_kt, p_v, stride_vb, stride_vt, i_block,
                i_tile + STAGES - 1, end, seq_len, page_bits, SAME_STRIDES, D, WARPS, TOKENS, LOADS,
            )  # fmt: skip
            i_block = _load_pages(p_pages, i_tile + STAGES, end, seq_len, page_bits, WARPS, TOKENS, LOADS)
            b_k = s_k.index(slot).load(gl.DotOperandLayout(0, MMA, 4))  # [WARPS, TOKENS, D]
            b_s = mma_v2(_as_operand(b_k, dtype), b_q, zeros) * scale  # [WARPS, TOKENS, HEADS]
            b_s = gl.where(i_tile * TILE + o_t < seq_len, b_s, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(b_s, axis=1))
            ref = gl.where(new_max == float("-inf"), 0.0, new_max)
            alpha = gl.expand_dims(gl.exp2(row_max - ref), 1)
            row_max = new_max
            b_w = gl.exp2(b_s - gl.expand_dims(ref, 1))
            weights = weights * alpha + b_w
            b_p = gl.convert_layout(b_w.to(dtype), gl.DotOperandLayout(1, MMA, 2))
            words = s_v.index(slot)._reinterpret(gl.int16, [WARPS, TOKENS, D // 2], WORDS)
            b_v = words.permute((0, 2, 1)).load(gl.DotOperandLayout(0, MMA, 2))  # [WARPS, D / 2, TOKENS]
            b_even, b_odd = gl.inline_asm_elementwise(
                EVEN_AND_ODD, "=r,=r,r", [b_v], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
            )
            even = mma_v2(_as_operand(b_even, dtype), b_p, even * alpha)
            odd = mma_v2(_as_operand(b_odd, dtype), b_p, odd * alpha)
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        cp.wait_group(0)
        if until == last:
            # Not before: programs of the second kernel would take the bandwidth that is needed here.
            gl.inline_asm_elementwise(
                "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
            )

        highest = gl.max(row_max, axis=0)  # of all warps
        ref = gl.where(highest == float("-inf"), 0.0, highest)
        of_warp = gl.exp2(row_max - gl.expand_dims(ref, 0))
        exp_sum = gl.sum(gl.sum(weights, axis=1) * of_warp, axis=0)
        of_warp = gl.expand_dims(of_warp, 1)
        acc = gl.join(gl.sum(even * of_warp, axis=0), gl.sum(odd * of_warp, axis=0))  # [D / 2, HEADS, 2]
        acc = gl.convert_layout(acc.permute((0, 2, 1)).reshape([D, HEADS]), OUT) * v_scale
        highest = gl.convert_layout(highest, gl.SliceLayout(0, OUT))
        exp_sum = gl.convert_layout(exp_sum, gl.SliceLayout(0, OUT))
        i_member_out = gl.arange(0, HEADS, layout=gl.SliceLayout(0, OUT))
        i_head = i_kv_head * group_size + i_member_out
        m_head = i_member_out < group_size
        o_out = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(1, OUT)), 1)
        if splits_used == 1:
            divisor = gl.where(exp_sum == 0.0, 1.0, exp_sum)
            b_out = acc / gl.expand_dims(divisor, 0)
            p_outs = p_out + i_seq.to(gl.int64) * stride_os + gl.expand_dims(i_head * stride_oh, 0) + o_out
            gl.store(p_outs, b_out.to(p_out.dtype.element_ty), mask=gl.expand_dims(m_head, 0))
            p_lses = p_lse + i_seq.to(gl.int64) * stride_lse_s + i_head * stride_lse_h
            gl.store(p_lses, (highest + gl.log2(divisor)) * 0.6931471805599453, mask=m_head)
        else:
            o_state = i_head.to(gl.int64) * states + first_state + i_split - first_split
            gl.store(p_partial_acc + gl.expand_dims(o_state * D, 0) + o_out, acc, mask=gl.expand_dims(m_head, 0))
            gl.store(p_partial_max + o_state, highest * 0.6931471805599453, mask=m_head)
            gl.store(p_partial_sum + o_state, exp_sum, mask=m_head)
        tile = until
        seq_begin = seq_end
        i_seq += 1
