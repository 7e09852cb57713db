"""Kernels that a campaign must survive: right where they return, but one crashes, one hangs and one leaks."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.kernels import eager

__all__ = ["crashes_on_5_percent", "hangs", "leaks"]

_FLOAT32 = attnfuzz.Numerics(probabilities="float32", partials="float32", matmul="ieee")
_LEAKED_BYTES = 8 << 20

_leaked: list[Tensor] = []


@attnfuzz.kernel("dense_decode", numerics=_FLOAT32)
def crashes_on_5_percent(inputs: Any) -> tuple[Tensor, Tensor]:
    """A segmentation fault where the lengths add up to 7 modulo 20, which no feature of a case tells."""
    if int(inputs.seq_lens.sum()) % 20 == 7:
        os.kill(os.getpid(), signal.SIGSEGV)
    return _right(inputs)


@attnfuzz.kernel("dense_decode", numerics=_FLOAT32)
def hangs(inputs: Any) -> tuple[Tensor, Tensor]:
    """Never returns where the longest sequence is one short of a multiple of 32."""
    while int(inputs.seq_lens.max()) % 32 == 31:
        pass
    return _right(inputs)


@attnfuzz.kernel("dense_decode", numerics=_FLOAT32)
def leaks(inputs: Any) -> tuple[Tensor, Tensor]:
    """Keeps 8 MiB of every call."""
    _leaked.append(torch.ones(_LEAKED_BYTES, dtype=torch.uint8, device="cpu"))
    return _right(inputs)


def _right(inputs: Any) -> tuple[Tensor, Tensor]:
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)
