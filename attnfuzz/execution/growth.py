"""A kernel called again and again in this process, and the memory that the process has afterwards."""

import gc
import os

import torch

from attnfuzz.declaration import Kernel
from attnfuzz.execution.leaks import MemoryUse
from attnfuzz.execution.process import descendant_bytes, resident_bytes
from attnfuzz.judging.observation import call_options
from attnfuzz.memory.arena import Arena
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.registry import problem_of

__all__ = ["GrowthTrial"]


class GrowthTrial:
    """`case` on `kernel`, as callers without attnfuzz would run it: each call has inputs of its own, none is watched.

    Buffers that the kernel allocates come from torch as they are, so that what it keeps of them is no more than that.
    """

    def __init__(self, kernel: Kernel, case: Case, *, device: str) -> None:
        self._kernel = kernel
        self._case = case
        self._device = device
        self._problem = problem_of(case)
        self._values = self._problem.values(case, device, kernel.declaration.supports)

    def use_after(self, calls: int) -> MemoryUse:
        """Call the kernel `calls` more times. Raises what it raises."""
        for _ in range(calls):
            self._call()
        if self._device == "cuda":
            torch.cuda.synchronize()
        gc.collect()
        pid = os.getpid()
        on_gpu = torch.cuda.memory_allocated() if self._device == "cuda" else 0
        return MemoryUse((resident_bytes(pid) or 0) + descendant_bytes(pid), on_gpu)

    def _call(self) -> None:
        arena = Arena(self._device, poison="nan", prefill="nan", capacity=tensor_nbytes(self._case))
        inputs = self._problem.build(self._case, arena, self._kernel.declaration.supports, self._values)
        self._kernel(inputs, **call_options(self._kernel, self._case))
