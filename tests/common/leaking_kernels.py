"""Kernels that keep memory, for good or within bounds; executors load them by this file's path."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

import attnfuzz

MEBIBYTE = 1 << 20
SUPPORTS = attnfuzz.Supports(dtypes=("float32",), head_sizes=(16, 32), strides="contiguous")

_kept: list[Any] = []
_latest: OrderedDict[int, Tensor] = OrderedDict()


def solve(inputs: Any) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(inputs.out), torch.full_like(inputs.lse, -torch.inf)
    group = inputs.q.shape[1] // inputs.k.shape[2]
    for seq, n in enumerate(inputs.seq_lens.tolist()):
        for head in range(inputs.q.shape[1] if n else 0):
            k, v = (cache[seq, :n, head // group] for cache in (inputs.k, inputs.v))
            scores = inputs.scale * (k @ inputs.q[seq, head])
            out[seq, head] = scores.softmax(0) @ v
            lse[seq, head] = scores.logsumexp(0)
    return out, lse


def block(inputs: Any, nbytes: int) -> Tensor:
    return torch.ones(nbytes, dtype=torch.uint8, device=inputs.q.device)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def keeps_16_mebibytes(inputs: Any) -> Any:
    _kept.append(block(inputs, 16 * MEBIBYTE))
    return solve(inputs)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def keeps_a_little(inputs: Any) -> Any:
    _kept.append(block(inputs, 32 << 10))
    return solve(inputs)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def keeps_much(inputs: Any) -> Any:
    """So much that a process does not last for twenty calls."""
    _kept.append(block(inputs, 100 * MEBIBYTE))
    return solve(inputs)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def keeps_with_groups(inputs: Any) -> Any:
    if inputs.q.shape[1] > inputs.k.shape[2]:
        _kept.append(block(inputs, 16 * MEBIBYTE))
    return solve(inputs)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def keeps_inputs(inputs: Any) -> Any:
    """What callers free stays."""
    _kept.append((inputs, block(inputs, 4 * MEBIBYTE)))
    return solve(inputs)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def keeps_the_latest(inputs: Any) -> Any:
    """A cache of forty entries that every call adds one to."""
    _latest[len(_kept)] = block(inputs, MEBIBYTE)
    _kept.append(None)
    if len(_latest) > 40:
        _latest.popitem(last=False)
    return solve(inputs)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def keeps_once(inputs: Any) -> Any:
    if not _kept:
        _kept.append(block(inputs, 200 * MEBIBYTE))
    return solve(inputs)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def makes_cycles(inputs: Any) -> Any:
    """Garbage that only the collector of cycles frees."""
    cycle: list[Any] = [block(inputs, 2 * MEBIBYTE)]
    cycle.append(cycle)
    return solve(inputs)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def raises(inputs: Any) -> Any:
    raise ValueError("no such block")
