"""A decode kernel with a choice of mistakes in how it touches memory; the lines to blame end in a comment that names
them.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import attnfuzz
from attnfuzz import Supports

MISTAKES = (
    "none", "narrow offsets", "cut to 32 bits", "row left out", "read before written", "past the end", "row too long",
    "query written",
)  # fmt: skip

_PLAIN: Any = Supports(dtypes=("float16",), head_sizes=(16,), empty_sequences=False, strides="last_contiguous")


@triton.jit
def decode_kernel(
    p_q, p_k, p_v, p_out, p_lse, p_lens, p_scratch, scale, num_heads, group,
    q_seq, q_head, k_seq, k_token, k_head, v_seq, v_token, v_head, out_seq, out_head,
    D: tl.constexpr, TILE: tl.constexpr, MISTAKE: tl.constexpr,
):  # fmt: skip
    """One program for each sequence and query head."""
    seq, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    length = tl.load(p_lens + seq)
    wide = seq.to(tl.int64)
    q = tl.load(p_q + wide * q_seq + head.to(tl.int64) * q_head + d).to(tl.float32)
    top = -float("inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    for start in range(0, length, TILE):
        token = start + tl.arange(0, TILE)
        far = token.to(tl.int64) * k_token
        if MISTAKE == "narrow offsets":
            far = token * k_token  # narrow offsets
        if MISTAKE == "cut to 32 bits":
            far = far.to(tl.int32)  # cut to 32 bits
        p_keys = p_k + wide * k_seq + (head // group).to(tl.int64) * k_head
        k = tl.load(p_keys + far[:, None] + d[None, :], mask=token[:, None] < length, other=0.0).to(tl.float32)
        at = wide * v_seq + (head // group).to(tl.int64) * v_head + token[:, None].to(tl.int64) * v_token + d[None, :]
        v = tl.load(p_v + at, mask=token[:, None] < length, other=0.0).to(tl.float32)
        score = tl.where(token < length, tl.sum(q[None, :] * k, 1) * scale, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 0))
        weight = tl.exp(score - higher)
        rescale = tl.exp(top - higher)
        total = total * rescale + tl.sum(weight, 0)
        acc = acc * rescale + tl.sum(weight[:, None] * v, 0)
        top = higher
    result = acc / total
    if MISTAKE == "read before written":
        result += tl.load(p_scratch + d)  # read before written
    if MISTAKE == "past the end":
        result += tl.load(p_lens + seq + tl.num_programs(0)) * 0.0  # past the end
    result = result.to(p_out.dtype.element_ty)
    p_row = p_out + wide * out_seq + head.to(tl.int64) * out_head
    if MISTAKE == "row left out":
        tl.store(p_row + d, result, mask=(d < D) & (head + 1 < num_heads))  # row left out
    else:
        tl.store(p_row + d, result)
    if MISTAKE == "row too long":
        tl.store(p_row + 2 * d, result, mask=head + 1 == num_heads)  # row too long
    if MISTAKE == "query written":
        tl.store(p_q + wide * q_seq + head.to(tl.int64) * q_head + d, result.to(p_q.dtype.element_ty))  # query written
    tl.store(p_lse + wide * num_heads + head, top + tl.log(total))


@attnfuzz.kernel("dense_decode", supports=_PLAIN, options={"mistake": MISTAKES})
def decode(inputs: Any, *, mistake: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the mistake that its option names."""
    q, k, v, out = inputs.q, inputs.k, inputs.v, inputs.out
    lse = torch.empty(inputs.lse.shape, dtype=torch.float32, device=q.device)
    scratch = torch.empty(q.shape[2], dtype=torch.float32, device=q.device)
    decode_kernel[q.shape[:2]](
        q, k, v, out, lse, inputs.seq_lens, scratch, inputs.scale, q.shape[1], q.shape[1] // k.shape[2],
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *out.stride()[:2],
        D=q.shape[2], TILE=16, MISTAKE=mistake,
    )  # fmt: skip
    return out, lse
