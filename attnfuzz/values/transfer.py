"""Numbers made on the host, brought to the device without waiting for what it is doing."""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor

__all__ = ["on_device"]


def on_device(host: Shaped[Tensor, "*shape"], device: torch.device | str) -> Shaped[Tensor, "*shape"]:
    """``host`` on ``device``. A copy from pageable memory would first wait until the GPU is idle."""
    if torch.device(device).type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
