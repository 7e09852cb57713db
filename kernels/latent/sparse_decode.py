"""Latent attention over lists of slots: DeepSeek's sparse attention, after its indexer has chosen the slots.

As ``latent_decode``, but for where a token's rows lie: place i of a query token's list holds a slot of the cache, or a
sentinel, which is any number that is none. A page table says where a *sequence* lies, so that its order is that of
time; a list has no order, a slot may stand in it twice, and then counts twice. A cache of 8 bits is as in
``latent_verify``.

A list of 2,048 slots is 2.4 MB, which one program would walk for as long as the whole GPU reads 150 lists. So several
share a list, as those of ``grouped_decode`` share a sequence, and ``combine_partials`` combines what they leave. A slot
is a load of its own before the row that it names: those of the next tile are loaded a step ahead. Rows lie anywhere,
but each in one piece: how far they lie apart is known when this is compiled, so that 656 bytes, of 8-bit rows, are seen
to be whole pieces of 16 bytes, and are loaded in these.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.grouped.combine_partials import count_splits


# As in dense_decode: no specialisation on what only places a base pointer or divides an index.
@triton.jit(
    do_not_specialize=[
        "num_heads", "num_slots", "topk", "num_splits", "has_lengths", "stride_ss", "stride_it", "stride_ot",
        "stride_oh",
    ]
)  # fmt: skip
def sparse_decode_kernel(
    # tensors, each followed by its strides in elements; last dimensions are contiguous
    p_q, stride_qt, stride_qh,  # [tokens, num_heads, RANK + ROPE]
    p_latents, stride_ls: tl.constexpr,  # [num_slots, 1, RANK]: a part of wider rows
    p_ropes, stride_rs: tl.constexpr,  # [num_slots, 1, ROPE]: likewise
    p_scales, stride_ss,  # [num_slots, 1, cdiv(RANK, SCALED)], or None
    p_indices, stride_it,  # [tokens, topk]
    p_lengths,  # [tokens]: places of a list that count; without has_lengths all do, and it is not read
    p_out, stride_ot, stride_oh,  # [tokens, num_heads, RANK]
    p_lse,  # [tokens, num_heads]
    # to be combined, as in grouped_decode
    p_partial_acc,  # [tokens, num_heads, num_splits, RANK]
    p_partial_max, p_partial_sum,  # without RANK
    # scalars
    scale,
    num_heads, num_slots, topk, num_splits, has_lengths,
    # constants
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    SCALED: tl.constexpr,  # numbers of a latent vector that share a scale, a power of two
    TILE: tl.constexpr,  # places of a list per step, a power of two
    BLOCK_M: tl.constexpr,  # query heads of a program: a power of two of at least 16, for tl.dot
    BLOCK_R: tl.constexpr,  # RANK rounded up to a power of two of at least 16
    BLOCK_P: tl.constexpr,  # ROPE likewise
    PDL: tl.constexpr,  # whether launched with programmatic dependent launch
):  # fmt: skip
    """Grid ``tokens * cdiv(num_heads, BLOCK_M), num_splits``: neighbours read the same rows."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    head_blocks = tl.cdiv(num_heads, BLOCK_M)
    i_split = tl.program_id(1)
    i_token = (tl.program_id(0) // head_blocks).to(tl.int64)
    length = tl.load(p_lengths + i_token, mask=has_lengths > 0, other=topk).to(tl.int32)
    splits_used = tl.maximum(count_splits(length, 0, num_splits, TILE), 1)
    if i_split >= splits_used:
        return
    p_list = p_indices + i_token * stride_it
    i_place = i_split * TILE + tl.arange(0, TILE)
    i_slot = tl.load(p_list + i_place, mask=i_place < length, other=-1)  # [TILE]

    i_head = (tl.program_id(0) % head_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_head = i_head < num_heads
    o_r = tl.arange(0, BLOCK_R).to(tl.int64)
    m_r = o_r < RANK
    o_p = tl.arange(0, BLOCK_P).to(tl.int64)
    m_p = o_p < ROPE
    p_heads = p_q + i_token * stride_qt + i_head[:, None] * stride_qh
    m_hr = m_head[:, None] & m_r[None, :]
    b_q = tl.load(p_heads + o_r[None, :], mask=m_hr, other=0.0)  # [BLOCK_M, BLOCK_R]
    if ROPE > 0:
        b_q_rope = tl.load(p_heads + RANK + o_p[None, :], mask=m_head[:, None] & m_p[None, :], other=0.0)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for _ in range(i_split * TILE, length, num_splits * TILE):
        # A slot that no list names may hold NaN, and a sentinel names none: neither is read, since 0 · NaN is not 0.
        m_t = (i_slot >= 0) & (i_slot < num_slots)
        o_row = i_slot.to(tl.int64)[:, None]
        m_tr = m_t[:, None] & m_r[None, :]
        b_latent = tl.load(p_latents + o_row * stride_ls + o_r[None, :], mask=m_tr, other=0.0)  # [TILE, BLOCK_R]
        if ROPE > 0:
            m_tp = m_t[:, None] & m_p[None, :]
            b_rope = tl.load(p_ropes + o_row * stride_rs + o_p[None, :], mask=m_tp, other=0.0)  # [TILE, BLOCK_P]
        if p_scales is not None:
            SCALES: tl.constexpr = max(BLOCK_R // SCALED, 1)
            o_s = tl.arange(0, SCALES)
            m_ts = m_t[:, None] & (o_s * SCALED < RANK)[None, :]
            b_scale = tl.load(p_scales + o_row * stride_ss + o_s[None, :], mask=m_ts, other=0.0)  # [TILE, SCALES]
            b_scaled = tl.reshape(b_latent.to(tl.float32), [TILE, SCALES, BLOCK_R // SCALES]) * b_scale[:, :, None]
            b_latent = tl.reshape(b_scaled.to(b_q.dtype), [TILE, BLOCK_R])
        i_place += num_splits * TILE
        i_slot = tl.load(p_list + i_place, mask=i_place < length, other=-1)  # [TILE], of the next tile

        b_s = tl.dot(b_q, tl.trans(b_latent))  # [BLOCK_M, TILE]
        if ROPE > 0:
            b_s = tl.dot(b_q_rope, tl.trans(b_rope), b_s)
        b_s = tl.where(m_t[None, :], b_s * scale, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, axis=1))
        ref = tl.where(new_max == float("-inf"), 0.0, new_max)  # a tile, or a whole list, may name no slot
        alpha = tl.exp(row_max - ref)
        b_w = tl.exp(b_s - ref[:, None])  # [BLOCK_M, TILE]
        exp_sum = exp_sum * alpha + tl.sum(b_w, axis=1)
        acc = tl.dot(b_w.to(b_latent.dtype), b_latent, acc * alpha[:, None])
        row_max = new_max

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if splits_used == 1:
        divisor = tl.where(exp_sum == 0.0, 1.0, exp_sum)
        b_out = acc / divisor[:, None]  # [BLOCK_M, BLOCK_R]
        o_out = i_token * stride_ot + i_head[:, None] * stride_oh + o_r[None, :]
        tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_hr)
        tl.store(p_lse + i_token * num_heads + i_head, row_max + tl.log(divisor), mask=m_head)
        return

    o_state = (i_token * num_heads + i_head) * num_splits + i_split  # [BLOCK_M]
    tl.store(p_partial_acc + o_state[:, None] * RANK + o_r[None, :], acc, mask=m_hr)
    tl.store(p_partial_max + o_state, row_max, mask=m_head)
    tl.store(p_partial_sum + o_state, exp_sum, mask=m_head)
