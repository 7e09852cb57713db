"""Numbers are rounded to fewer bits than anybody has agreed to: in plain PyTorch, to be seen at a glance."""

# mypy: disable-error-code="import-not-found, no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
from honest_kernels import SUPPORTS

import attnfuzz


def _rows(i: Any):
    """Query, keys and values of each row: [head_size], [seq_len, head_size] twice, with its place."""
    group = i.q.shape[1] // i.k_cache.shape[2]
    for seq, length in enumerate(i.seq_lens.tolist()):
        token = torch.arange(length, device=i.q.device)
        page = i.block_table[seq].long()[token // i.block_size]
        k, v = (cache[page, token % i.block_size] for cache in (i.k_cache, i.v_cache))
        for head in range(i.q.shape[1]):
            yield (seq, head), i.q[seq, head], k[:, head // group], v[:, head // group]


def _attend(i: Any, scores, weights, average):
    out, lse = torch.zeros_like(i.q), torch.full_like(i.lse, float("-inf"))
    for at, q, k, v in _rows(i):
        if len(k):
            s = scores(q, k, i.scale)
            lse[at] = torch.logsumexp(s.float(), 0)
            out[at] = average(weights(torch.exp(s.float() - lse[at])), v)
    return out, lse


def _float32_scores(q, k, scale):
    return k.float() @ q.float() * scale


def _float32_average(p, v):
    return p.float() @ v.float()


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def accumulates_in_half(i: Any):
    """The sum over tokens is kept in 16 bits, whatever the inputs have."""

    def average(p, v):
        total = torch.zeros(v.shape[1], dtype=torch.float16, device=v.device)
        for weight, value in zip(p, v, strict=True):
            total = (total.float() + weight * value.float()).half()
        return total

    return _attend(i, _float32_scores, lambda p: p, average)


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def weights_in_8_bits(i: Any):
    """Softmax weights in e4m3: twice as fast on tensor cores that have it."""
    return _attend(
        i, _float32_scores, lambda p: (p / p.max()).to(torch.float8_e4m3fn).float() * p.max(), _float32_average
    )


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def keys_in_8_bits(i: Any):
    """Queries and keys in e4m3."""

    def scores(q, k, scale):
        return k.to(torch.float8_e4m3fn).float() @ q.to(torch.float8_e4m3fn).float() * scale

    return _attend(i, scores, lambda p: p, _float32_average)
