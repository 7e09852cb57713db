"""The device a launch goes to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["on_device_of"]


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Context in which Triton launches on ``tensor``'s GPU: it takes the current one, not the arguments'."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
