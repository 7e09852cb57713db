"""The device a launch goes to, and what a launch depends on of it, which is known without waiting for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_AS_IT_IS = nullcontext()
_HOPPER = (9, 0)
_KEPT_BYTES = 1 << 10
"""Shared memory of a multiprocessor that is kept back for each program on it."""


class GpuLimits(NamedTuple):
    """``processors``: multiprocessors, or AMD's compute units. ``shared_bytes``: the most shared memory of a program.
    ``is_hopper``: of NVIDIA and of capability 9.0 at least, which brings warp groups and programmatic dependent launch.
    ``name``, ``capability``: what torch calls it, by which a measured launch is found.
    """

    processors: int
    shared_bytes: int
    is_amd: bool
    is_hopper: bool
    name: str = ""
    capability: tuple[int, int] | None = None


@lru_cache
def gpu_at(device: torch.device) -> GpuLimits | None:
    """The GPU; None for a CPU, where the interpreter runs one program at a time and has no shared memory to run out of.

    Of NVIDIA's multiprocessors a program may have all shared memory but 1 KiB, which the system keeps (CUDA C++
    Programming Guide, "Shared Memory" of each capability); of AMD's, what a program may have is said.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    is_amd = torch.version.hip is not None
    shared = properties.shared_memory_per_block if is_amd else properties.shared_memory_per_multiprocessor - _KEPT_BYTES
    # Capabilities of ROCm's devices are other numbers, (9, 4) for one that has nothing of Hopper's.
    capability = torch.cuda.get_device_capability(device)
    is_hopper = not is_amd and capability >= _HOPPER
    return GpuLimits(properties.multi_processor_count, shared, is_amd, is_hopper, properties.name, capability)


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Context in which Triton launches on ``tensor``'s GPU: it takes the current one, not the arguments'."""
    if not tensor.is_cuda or torch.cuda.current_device() == tensor.get_device():
        return _AS_IT_IS
    return torch.cuda.device(tensor.device)


def count_sms(tensor: Tensor) -> int:
    """Multiprocessors of ``tensor``'s GPU; 1 on a CPU."""
    gpu = gpu_at(tensor.device)
    return 1 if gpu is None else gpu.processors
