"""Kernels that declare nothing: one rests on contiguous tensors, one refuses what it cannot do, others have a bug."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnfuzz


def solve(inputs: Any, q: Tensor, k: Tensor, v: Tensor, *, kv_head: Any) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(inputs.out), torch.full_like(inputs.lse, -torch.inf)
    for seq, n in enumerate(inputs.seq_lens.tolist()):
        for head in range(q.shape[1] if n else 0):
            keys, values = (cache[seq, :n, kv_head(head)].float() for cache in (k, v))
            scores = inputs.scale * (keys @ q[seq, head].float())
            out[seq, head] = scores.softmax(0) @ values
            lse[seq, head] = scores.logsumexp(0)
    return out, lse


def as_if_contiguous(tensor: Tensor) -> Tensor:
    """What lies where a kernel looks that computes addresses from the shape alone."""
    plain = torch.empty(tensor.shape, device="meta", dtype=tensor.dtype).stride()
    return tensor.as_strided(tensor.shape, plain)


def grouped(inputs: Any) -> Any:
    group = inputs.q.shape[1] // inputs.k.shape[2]
    return lambda head: head // group


@attnfuzz.kernel("dense_decode")
def rests_on_contiguous_v(inputs: Any) -> Any:
    return solve(inputs, inputs.q, inputs.k, as_if_contiguous(inputs.v), kv_head=grouped(inputs))


@attnfuzz.kernel("dense_decode")
def wrong_head_map(inputs: Any) -> Any:
    return solve(inputs, inputs.q, inputs.k, inputs.v, kv_head=lambda head: head % inputs.k.shape[2])
