"""Kernels that end, block or starve the process they run in; executors load them by this file's path."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.judging import service as judging

CORRECT_ONLY_FOR = 7
"""The sequence length from which `wrong_from_seven` drops a token."""


def solve(inputs: Any, *, drop: int = 0, scale: float | None = None) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(inputs.out), inputs.q.new_full(inputs.q.shape[:2], -torch.inf, dtype=torch.float32)
    group = inputs.q.shape[1] // inputs.k.shape[2]
    for seq, n in enumerate(inputs.seq_lens.tolist()):
        for head in range(inputs.q.shape[1] if n > drop else 0):
            k, v = (cache[seq, : n - drop, head // group].float() for cache in (inputs.k, inputs.v))
            scores = (inputs.scale if scale is None else scale) * (k @ inputs.q[seq, head].float())
            out[seq, head] = scores.softmax(0) @ v
            lse[seq, head] = scores.logsumexp(0)
    return out, lse


@attnfuzz.kernel("dense_decode", options={"tile": (16, 32)})
def correct(inputs: Any, *, tile: int) -> Any:
    return solve(inputs)


@attnfuzz.kernel("dense_decode")
def wrong_from_seven(inputs: Any) -> Any:
    return solve(inputs, drop=int(max(inputs.seq_lens.tolist()) >= CORRECT_ONLY_FOR))


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(lse="none"))
def leaves_the_scale_out(inputs: Any) -> Any:
    return solve(inputs, scale=1.0)[0]


@attnfuzz.kernel("dense_decode")
def prints_nan(inputs: Any) -> Any:
    print("a kernel that talks", flush=True)
    return torch.full_like(inputs.out, torch.nan), inputs.lse.zero_()


@attnfuzz.kernel("dense_decode")
def segfaults(inputs: Any) -> None:
    ctypes.string_at(0)


@attnfuzz.kernel("dense_decode")
def segfaults_at_seven(inputs: Any) -> Any:
    if max(inputs.seq_lens.tolist()) == CORRECT_ONLY_FOR:
        ctypes.string_at(0)
    return solve(inputs)


@attnfuzz.kernel("dense_decode")
def hangs_at_seven(inputs: Any) -> Any:
    while max(inputs.seq_lens.tolist()) == CORRECT_ONLY_FOR:
        time.sleep(0.01)
    return solve(inputs)


@attnfuzz.kernel("dense_decode")
def loses_context_at_seven(inputs: Any) -> Any:
    return leaves_cuda_error(inputs) if max(inputs.seq_lens.tolist()) == CORRECT_ONLY_FOR else solve(inputs)


@attnfuzz.kernel("dense_decode")
def exits(inputs: Any) -> None:
    os._exit(3)


@attnfuzz.kernel("dense_decode")
def calls_sys_exit(inputs: Any) -> None:
    sys.exit("enough")


@attnfuzz.kernel("dense_decode")
def never_returns(inputs: Any) -> None:
    while True:
        time.sleep(0.01)


@attnfuzz.kernel("dense_decode")
def eats_memory(inputs: Any) -> None:
    hoard = []
    while True:
        hoard.append(bytearray(1 << 24))


@attnfuzz.kernel("dense_decode")
def closes_descriptors(inputs: Any) -> None:
    os.closerange(3, 256)


@attnfuzz.kernel("dense_decode")
def leaves_cuda_error(inputs: Any) -> None:
    def lost(device: object = None) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = lost  # what a lost context does
    lost()


def starve(*_: Any, **__: Any) -> Any:
    """What cases get once the memory of the GPU is taken."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


@attnfuzz.kernel("dense_decode")
def leaves_no_memory(inputs: Any) -> Any:
    vars(judging)["judge"] = starve
    return solve(inputs)
