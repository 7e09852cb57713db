"""Kernels for campaigns that are disturbed from outside: quick ones, most of them with a bug that must not get lost."""

from __future__ import annotations

import os
from typing import Any

import attnfuzz
from attnfuzz.kernels import eager

SUPPORTS = attnfuzz.Supports(dtypes=("float32",), head_sizes=(16, 32), strides="contiguous")

_hoard: list[bytearray] = []


def solve(inputs: Any) -> tuple[Any, Any]:
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def right(inputs: Any) -> Any:
    return solve(inputs)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def wrong(inputs: Any) -> Any:
    out, lse = solve(inputs)
    out[inputs.seq_lens > 1] += 1
    return out, lse


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def crashes(inputs: Any) -> Any:
    if inputs.seq_lens.max() > 40:
        os.abort()
    return solve(inputs)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def hoards(inputs: Any) -> Any:
    """Leaks 8 MB a run, touched so that they count."""
    _hoard.append(bytearray(os.urandom(1)) * (8 << 20))
    return solve(inputs)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def kills_its_parent(inputs: Any) -> Any:
    if inputs.seq_lens.max() > 8:
        os.kill(os.getppid(), 9)
    return solve(inputs)
