"""Kernels that fail because of what ran before, or by chance; executors load them by this file's path."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnfuzz

ONLY_16_AND_32 = attnfuzz.Supports(dtypes=("float16",), head_sizes=(16, 32), strides="contiguous")

_state: dict[str, Any] = {"calls": 0, "wide": False}


def solve(inputs: Any) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(inputs.out), torch.full_like(inputs.lse, -torch.inf)
    group = inputs.q.shape[1] // inputs.k.shape[2]
    for seq, n in enumerate(inputs.seq_lens.tolist()):
        for head in range(inputs.q.shape[1] if n else 0):
            k, v = (cache[seq, :n, head // group].float() for cache in (inputs.k, inputs.v))
            scores = inputs.scale * (k @ inputs.q[seq, head].float())
            out[seq, head] = scores.softmax(0) @ v
            lse[seq, head] = scores.logsumexp(0)
    return out, lse


@attnfuzz.kernel("dense_decode", supports=ONLY_16_AND_32)
def crashes_after_wide_heads(inputs: Any) -> Any:
    """Dies of three query heads once a case with head size 32 has run, which has another number of them."""
    if inputs.q.shape[1] != 3:  # or a case would die of its own first run
        _state["wide"] |= inputs.q.shape[2] == 32
    elif _state["wide"]:
        ctypes.string_at(0)
    return solve(inputs)


@attnfuzz.kernel("dense_decode", supports=ONLY_16_AND_32)
def crashes_at_the_tenth_call(inputs: Any) -> Any:
    _state["calls"] += 1
    if _state["calls"] == 10:
        ctypes.string_at(0)
    return solve(inputs)


@attnfuzz.kernel("dense_decode", supports=ONLY_16_AND_32)
def reuses_a_buffer(inputs: Any) -> Any:
    """Keeps the largest accumulator so far, and clears only what the last sequence of the case needs."""
    heads, size = inputs.q.shape[1:]
    buffer = _state.get("buffer")
    if buffer is None or buffer.shape[0] < heads:
        buffer = _state["buffer"] = torch.zeros(heads, 32)
    out, lse = solve(inputs)
    if heads > 1:
        buffer[:heads] = 1.0
    elif bool(buffer.any()):
        out += buffer[:1, :size].to(out.dtype)
    return out, lse


def one_time_in_four() -> bool:
    """Never twice within three calls of all processes that share a temporary folder.

    With independent chances a case would fail each time it is tried in one test run of some thousand, and be rightly
    taken for one that always fails. Multiples of the golden ratio, modulo one, fall below 0.236 once in three, five or
    eight calls.
    """
    calls = Path(tempfile.gettempdir(), "calls_of_flaky_kernels")
    with calls.open("ab") as counter:
        counter.write(b".")
        counter.flush()
        return counter.tell() * 0.6180339887 % 1 < 0.236


@attnfuzz.kernel("dense_decode", supports=ONLY_16_AND_32)
def wrong_one_time_in_four(inputs: Any) -> Any:
    out, lse = solve(inputs)
    if inputs.q.shape[1] > 1 and one_time_in_four():
        out += 1.0
    return out, lse


@attnfuzz.kernel("dense_decode", supports=ONLY_16_AND_32)
def crashes_one_time_in_four(inputs: Any) -> Any:
    if inputs.q.shape[1] > 1 and one_time_in_four():
        ctypes.string_at(0)
    return solve(inputs)


@attnfuzz.kernel(
    "dense_decode", supports=attnfuzz.Supports(dtypes=("float16",), head_sizes=(16, 32, 64, 80), strides="contiguous")
)
def crashes_at_80_and_odd(inputs: Any) -> Any:
    """On about one case in twenty."""
    if inputs.q.shape[2] == 80 and any(n % 2 for n in inputs.seq_lens.tolist()):
        ctypes.string_at(0)
    return solve(inputs)
