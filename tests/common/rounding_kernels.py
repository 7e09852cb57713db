"""A decode kernel with a choice of rounding mistakes; the line of each ends in a comment that names it."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import attnfuzz
from attnfuzz import Numerics, Supports

MISTAKES = (
    "none", "products", "products and sums", "scores", "scaled query", "row sum", "accumulator", "short exp2",
    "weights in float8_e4m3fn", "K to float8_e5m2", "V to float8_e5m2", "no maximum", "partial LSE",
)  # fmt: skip
"""Names of `Failure.replays`."""

_PLAIN: Any = Supports(dtypes=("float16", "bfloat16"), head_sizes=(16, 64), strides="contiguous", empty_sequences=False)


@triton.jit
def _score(q, k, MISTAKE: tl.constexpr):
    if MISTAKE == "products":
        score = tl.sum((q[None, :] * k).to(tl.float32), 1)  # products
    elif MISTAKE == "products and sums":
        score = tl.sum(q[None, :] * k, 1)  # products and sums
    else:
        score = tl.sum(q[None, :].to(tl.float32) * k.to(tl.float32), 1)
    return score.to(tl.float32)


@triton.jit
def decode_kernel(
    p_q, p_k, p_v, p_out, p_lse, p_lens, p_halves, scale, num_heads, group, longest,
    D: tl.constexpr, TILE: tl.constexpr, MISTAKE: tl.constexpr,
):  # fmt: skip
    """One program for each sequence and query head: ``[num_seqs num_heads D]`` of ``[num_seqs longest heads D]``."""
    seq, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    length = tl.load(p_lens + seq)
    row = (seq * num_heads + head).to(tl.int64)
    q = tl.load(p_q + row * D + d)
    kv_heads = num_heads // group
    if MISTAKE == "scaled query":
        q = (q * scale).to(p_q.dtype.element_ty)  # scaled query
    top = -float("inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    for start in range(0, length, TILE):
        token = start + tl.arange(0, TILE)
        at = ((seq * longest + token[:, None]).to(tl.int64) * kv_heads + head // group) * D + d[None, :]
        k = tl.load(p_k + at, mask=token[:, None] < length, other=0.0)
        v = tl.load(p_v + at, mask=token[:, None] < length, other=0.0)
        if MISTAKE == "K to float8_e5m2":
            k = k.to(tl.float8e5).to(tl.float32)  # K to float8_e5m2
        if MISTAKE == "V to float8_e5m2":
            v = v.to(tl.float8e5).to(tl.float32)  # V to float8_e5m2
        score = _score(q, k, MISTAKE)
        if MISTAKE != "scaled query":
            score = score * scale
        if MISTAKE == "scores":
            score = score.to(p_q.dtype.element_ty).to(tl.float32)  # scores
        score = tl.where(token < length, score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 0)) if MISTAKE != "no maximum" else 0.0
        if MISTAKE == "no maximum":
            weight = tl.exp(score)  # no maximum
        elif MISTAKE == "short exp2":
            exponent = ((score - higher) * 1.4426950408889634).to(p_q.dtype.element_ty)  # short exp2
            weight = tl.exp2(exponent.to(tl.float32)).to(p_q.dtype.element_ty).to(tl.float32)
        else:
            weight = tl.exp(score - higher)
        rescale = tl.exp(top - higher) if MISTAKE != "no maximum" else 1.0
        total = total * rescale + tl.sum(weight, 0)
        if MISTAKE == "row sum":
            total = total.to(p_q.dtype.element_ty).to(tl.float32)  # row sum
        if MISTAKE == "weights in float8_e4m3fn":
            weight = weight.to(tl.float8e4nv).to(tl.float32)  # weights in float8_e4m3fn
        acc = acc * rescale + tl.sum(weight[:, None] * v.to(tl.float32), 0)
        if MISTAKE == "accumulator":
            acc = acc.to(p_q.dtype.element_ty).to(tl.float32)  # accumulator
        top = higher
    tl.store(p_out + row * D + d, (acc / total).to(p_out.dtype.element_ty))
    if MISTAKE == "partial LSE":
        tl.store(p_halves + row, top + tl.log(total))  # partial LSE
    else:
        tl.store(p_lse + row, top + tl.log(total))


def _run(inputs: Any, mistake: str) -> tuple[torch.Tensor, torch.Tensor]:
    num_seqs, num_heads, head_size = inputs.q.shape
    halves = torch.empty(inputs.lse.shape, dtype=inputs.q.dtype, device=inputs.q.device)
    group, longest = num_heads // inputs.k.shape[2], inputs.k.shape[1]
    decode_kernel[(num_seqs, num_heads)](
        inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, inputs.seq_lens, halves, inputs.scale, num_heads, group,
        longest, D=head_size, TILE=16, MISTAKE=mistake,
    )  # fmt: skip
    if mistake == "partial LSE":
        inputs.lse.copy_(halves)
    return inputs.out, inputs.lse


@attnfuzz.kernel("dense_decode", supports=_PLAIN, options={"mistake": MISTAKES})
def decode(inputs: Any, *, mistake: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the mistake that its option names."""
    return _run(inputs, mistake)


@attnfuzz.kernel("dense_decode", supports=_PLAIN)
def rounded_products(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds each product of q and k."""
    return _run(inputs, "products")


@attnfuzz.kernel("dense_decode", supports=_PLAIN)
def scaled_by_hand(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds nothing, but takes a scale that is too large for another one."""
    out, lse = _run(inputs, "none")
    return out.mul_(1.5), lse


@attnfuzz.kernel("dense_decode", supports=_PLAIN, numerics=Numerics(row_sum="float32"))
def eager_products(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds each product of q and k, with torch's own operations."""
    group = inputs.q.shape[1] // inputs.k.shape[2]
    for i, length in enumerate(inputs.seq_lens.tolist()):
        k, v = (part[i, :length].repeat_interleave(group, 1).transpose(0, 1) for part in (inputs.k, inputs.v))
        scores = (inputs.q[i, :, None] * k).float().sum(-1) * inputs.scale  # eager products
        inputs.lse[i] = scores.logsumexp(-1)
        inputs.out[i] = torch.einsum("hn,hnd->hd", scores.softmax(-1), v.float())
    return inputs.out, inputs.lse
