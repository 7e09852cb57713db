"""A service with the memory of a GPU pretended: tensors are on the host, what a kernel keeps counts against a limit.

What asks for memory beyond it is told so as torch does on a GPU, be it the kernel or attnfuzz itself. As a command it
is attnfuzz with executors that run this service.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnfuzz.cli import main
from attnfuzz.judging import runner
from attnfuzz.judging.leaks import MemoryUse
from attnfuzz.judging.messages import DeviceReply, DeviceRequest, GrowthReply, GrowthRequest
from attnfuzz.judging.service import JudgingService

LIMIT = "PRETENDED_GPU_BYTES"
_ALLOCATORS = ("empty", "full", "ones")


class PretendedGpu(JudgingService):
    """Kernels of ``leaking_kernels.py`` keep what they keep in a list there."""

    def __init__(self) -> None:
        super().__init__()
        self._device = "cpu"
        self._limit = int(os.environ[LIMIT])
        for name in _ALLOCATORS:
            setattr(torch, name, self._limited(getattr(torch, name)))

    def kept_bytes(self) -> int:
        modules = (vars(module) for name, module in sys.modules.items() if "leaking_kernels" in name)
        kept = [one for module in modules for one in module.get("_kept", ()) if isinstance(one, Tensor)]
        return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}.values())

    def _limited(self, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_within(*arguments: Any, **named: Any) -> Tensor:
            made = allocate(*arguments, **named)
            if self.kept_bytes() + made.untyped_storage().nbytes() > self._limit:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {made.nbytes} bytes.\nGPU 0 has")
            return made

        return allocate_within

    def _describe_device(self, request: DeviceRequest) -> DeviceReply:
        return DeviceReply("cuda", "Pretended GPU", super()._describe_device(request).versions)

    def _gpu_share_held(self) -> float:
        return self.kept_bytes() / self._limit

    def _growth_after(self, request: GrowthRequest) -> GrowthReply:
        reply = super()._growth_after(request)
        return reply if reply.use is None else GrowthReply(use=MemoryUse(reply.use.host_bytes, self.kept_bytes()))


if __name__ == "__main__":
    runner.SERVICE = f"{__file__}:PretendedGpu"
    main()
