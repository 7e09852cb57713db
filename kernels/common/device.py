"""The device a launch goes to, and how many programs it runs at once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["count_sms", "on_device_of"]

_AS_IT_IS = nullcontext()


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Context in which Triton launches on ``tensor``'s GPU: it takes the current one, not the arguments'."""
    if not tensor.is_cuda or torch.cuda.current_device() == tensor.get_device():
        return _AS_IT_IS
    return torch.cuda.device(tensor.device)


def count_sms(tensor: Tensor) -> int:
    """Streaming multiprocessors of ``tensor``'s GPU, without waiting for it; 1 on a CPU, which runs one at a time."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1
