"""Kernels whose module changes PyTorch's defaults, as vLLM's tests do; executors load them from here."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.kernels import bundled

torch.set_default_device("meta")
torch.set_default_dtype(torch.float16)


@attnfuzz.kernel("paged_decode")
def right(inputs: Any) -> tuple[Tensor, Tensor]:
    made = torch.empty(1)
    if made.device.type != "meta" or made.dtype is not torch.float16:
        raise RuntimeError("the defaults that this module set are not what its kernels see")
    return bundled.paged_eager(inputs)  # type: ignore[no-any-return]  # a Kernel returns whatever its function does


@attnfuzz.kernel("paged_decode")
def wrong(inputs: Any) -> tuple[Tensor, Tensor]:
    """The last token is dropped."""
    return right(dataclasses.replace(inputs, seq_lens=(inputs.seq_lens - 1).clamp(min=0)))  # type: ignore[no-any-return]  # likewise
