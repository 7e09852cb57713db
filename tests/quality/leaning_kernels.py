"""Decode in Triton with tiles of 64 tokens: one is right, the others make mistakes that stay within their bounds."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import attnfuzz
from tests.planted import planted


@triton.jit
def _cut_off(x, dtype: tl.constexpr):
    """Towards zero, to float16, by leaving out the 13 bits that it has not."""
    bits = x.to(tl.int32, bitcast=True) & -8192
    return bits.to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def _decode(
    q, k_cache, v_cache, block_table, seq_lens, out, lse,
    scale, table_width, num_kv_heads, group_size,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, TILE: tl.constexpr, MISTAKE: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    d, t = tl.arange(0, HEAD_SIZE), tl.arange(0, TILE)
    row = seq * tl.num_programs(1) + head
    query = tl.load(q + row * HEAD_SIZE + d).to(tl.float32)
    m, total = float("-inf"), 0.0
    acc = tl.zeros([HEAD_SIZE], tl.float32)
    for start in range(0, seq_len, TILE):
        live = start + t < seq_len
        page = (start + t) // BLOCK_SIZE
        block = tl.load(block_table + seq * table_width + page, mask=live, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + (start + t) % BLOCK_SIZE) * num_kv_heads + head // group_size
        offsets = slot[:, None] * HEAD_SIZE + d[None, :]
        key = tl.load(k_cache + offsets, mask=live[:, None], other=0.0).to(tl.float32)
        value = tl.load(v_cache + offsets, mask=live[:, None], other=0.0)
        score = tl.where(live, tl.sum(query[None, :] * key, axis=1) * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, axis=0))
        p, alpha = tl.exp(score - m_new), tl.exp(m - m_new)
        total = total * alpha + tl.sum(p, axis=0)
        rounded = _cut_off(p, value.dtype) if MISTAKE == "weights" else p.to(value.dtype)
        acc = acc * alpha + tl.sum(rounded.to(tl.float32)[:, None] * value.to(tl.float32), axis=0)
        if MISTAKE == "row sum":
            total = total.to(value.dtype).to(tl.float32)
        if MISTAKE == "accumulator":
            acc = acc.to(value.dtype).to(tl.float32)
        m = m_new
    result = acc / total
    stored = _cut_off(result, out.dtype.element_ty) if MISTAKE == "output" else result.to(out.dtype.element_ty)
    tl.store(out + row * HEAD_SIZE + d, stored)
    tl.store(lse + row, m + tl.log(total))


_SUPPORTS = attnfuzz.Supports(
    dtypes=("float16",),
    head_sizes=(16, 32, 64, 128),
    block_sizes=(16, 32),
    layouts=("NHD",),
    strides="contiguous",
    empty_sequences=False,
)
_NUMERICS = attnfuzz.Numerics(partials="float32")


def _run(inputs: Any, mistake: str) -> tuple[torch.Tensor, torch.Tensor]:
    num_seqs, num_q_heads, head_size = inputs.q.shape
    num_kv_heads = inputs.k_cache.shape[2]
    _decode[(num_seqs, num_q_heads)](
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_lens, inputs.out, inputs.lse,
        inputs.scale, inputs.block_table.shape[1], num_kv_heads, num_q_heads // num_kv_heads,
        BLOCK_SIZE=inputs.block_size, HEAD_SIZE=head_size, TILE=64, MISTAKE=mistake,
    )  # fmt: skip
    return inputs.out, inputs.lse


correct = planted("correct", lambda i: _run(i, ""), "paged_decode", supports=_SUPPORTS, numerics=_NUMERICS)
row_sum_in_16_bits = planted(
    "row_sum_in_16_bits", lambda i: _run(i, "row sum"), "paged_decode", supports=_SUPPORTS, numerics=_NUMERICS
)
accumulator_in_16_bits = planted(
    "accumulator_in_16_bits", lambda i: _run(i, "accumulator"), "paged_decode", supports=_SUPPORTS, numerics=_NUMERICS
)
cut_off_output = planted(
    "cut_off_output", lambda i: _run(i, "output"), "paged_decode", supports=_SUPPORTS, numerics=_NUMERICS
)
cut_off_weights = planted(
    "cut_off_weights", lambda i: _run(i, "weights"), "paged_decode", supports=_SUPPORTS, numerics=_NUMERICS
)
