"""The places of the k largest scores of each row, as a sparse layer's indexer needs them.

A program has a row. It finds the k-th largest score bit by bit, from the highest: the next bit is 1 if at least k
scores are no less than the bits found so far and that 1. Then it names what is larger, and of what is equal as many as
are missing. Scores become integers of the same order before:

    key(x) = 0 for NaN, else bits(x) with the sign flipped, and all others too where x < 0
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl


@triton.jit
def _keys(p_row, place, length):
    """The keys of scores; -1 past the row, which is below all keys."""
    b_x = tl.load(p_row + place, mask=place < length, other=0.0)
    bits = b_x.to(tl.int32, bitcast=True).to(tl.int64)  # int64, since Triton has no comparison of unsigned literals
    keys = tl.where(bits < 0, -1 - bits, bits + (1 << 31))
    keys = tl.where(b_x != b_x, 0, keys)
    return tl.where(place < length, keys, -1)


@triton.jit(do_not_specialize=["stride_s", "stride_i", "topk"])
def indexer_topk_kernel(
    p_scores, stride_s,  # [rows, width]
    p_lengths,  # [rows]
    p_indices, stride_i,  # [rows, topk]
    topk,
    TILE: tl.constexpr,  # scores per step, a power of two
):  # fmt: skip
    """Grid ``rows``."""
    i_row = tl.program_id(0).to(tl.int64)
    length = tl.load(p_lengths + i_row)
    p_row = p_scores + i_row * stride_s
    p_found = p_indices + i_row * stride_i
    o = tl.arange(0, TILE)

    least = tl.zeros([], tl.int64)  # of the keys that are named: 0, if there are no more than topk
    for step in range(32):
        tried = least + (tl.full([], 1, tl.int64) << (31 - step))
        count = tl.zeros([], tl.int32)
        for start in range(0, length, TILE):
            count += tl.sum((_keys(p_row, start + o, length) >= tried).to(tl.int32), axis=0)
        least = tl.where(count >= topk, tried, least)

    larger = tl.zeros([], tl.int32)
    for start in range(0, length, TILE):
        larger += tl.sum((_keys(p_row, start + o, length) > least).to(tl.int32), axis=0)
    ends = tl.zeros([], tl.int32)  # of places that hold a larger score
    equals = larger
    for start in range(0, length, TILE):
        b_keys = _keys(p_row, start + o, length)
        is_larger = (b_keys > least).to(tl.int32)
        is_equal = (b_keys == least).to(tl.int32)
        o_larger = ends + tl.cumsum(is_larger, axis=0) - 1
        o_equal = equals + tl.cumsum(is_equal, axis=0) - 1
        tl.store(p_found + o_larger, start + o, mask=is_larger == 1)
        tl.store(p_found + o_equal, start + o, mask=(is_equal == 1) & (o_equal < topk))
        ends += tl.sum(is_larger, axis=0)
        equals += tl.sum(is_equal, axis=0)
    for start in range(length, topk, TILE):
        tl.store(p_found + start + o, -1, mask=start + o < topk)
