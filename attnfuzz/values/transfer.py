"""Numbers made on the host, brought to the device without waiting for what it is doing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

__all__ = ["all_on_device", "on_device"]


def on_device(host: Shaped[Tensor, "*shape"], device: torch.device | str) -> Shaped[Tensor, "*shape"]:
    """``host`` on ``device``. A copy from pageable memory would first wait until the GPU is idle."""
    if torch.device(device).type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def all_on_device(hosts: Sequence[Shaped[Tensor, "..."]], device: torch.device | str) -> list[Shaped[Tensor, "..."]]:
    """As `on_device` for many small tensors, in one copy for each dtype."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(host.dtype for host in hosts):
        chosen = [i for i, host in enumerate(hosts) if host.dtype == dtype]
        sizes = [hosts[i].numel() for i in chosen]
        joined = torch.empty(sum(sizes), dtype=dtype, device="cpu", pin_memory=torch.device(device).type != "cpu")
        torch.cat([hosts[i].reshape(-1) for i in chosen], out=joined)
        parts = torch.split(joined.to(device, non_blocking=True), sizes)
        found |= {i: part.view(hosts[i].shape) for i, part in zip(chosen, parts, strict=True)}
    return [found[i] for i in range(len(hosts))]
