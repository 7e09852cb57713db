"""The service of the process that runs what is timed: it may die of it, and then only that contender has no times."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import cached_property
from typing import Any

import msgspec
import torch

from attnfuzz.bench.kernels.contender import Contender, NotMeasured, Unsupported, as_not_measured, measure
from attnfuzz.bench.kernels.shapes import (
    CopyRequest,
    MachineReply,
    MeasureReply,
    MeasureRequest,
    Timed,
    bytes_to_move,
)
from attnfuzz.bench.kernels.timing import (
    MOST_SETS,
    CaptureFailed,
    Stopwatch,
    cuda_stopwatch,
    host_stopwatch,
    sets_beyond,
    time_copy,
)
from attnfuzz.declaration import Kernel, KernelLoadError, load_kernels
from attnfuzz.environment import installed
from attnfuzz.isolation.serve import ExitAfterReply
from attnfuzz.judging.messages import DeclarationsReply, DeclarationsRequest, DeviceRequest
from attnfuzz.judging.tampering import Watch
from attnfuzz.project import working_folder
from attnfuzz.triton_compat.interpreter import set_up_interpreter


class TimingService:
    """Methods: see ``messages``, and "declarations" of ``attnfuzz.judging.messages``."""

    def __init__(self) -> None:
        set_up_interpreter()
        self._folder = working_folder()
        self._kernels: dict[str, Kernel] = {}
        self._is_spoiled = False
        self._watch = Watch()  # before any contender is imported
        self._drawn: tuple[object, list[Any]] | None = None
        self._methods: dict[str, tuple[type[msgspec.Struct], Callable[[Any], msgspec.Struct]]] = {
            "copy": (CopyRequest, self._copy),
            "declarations": (DeclarationsRequest, self._declarations),
            "machine": (DeviceRequest, lambda _: self.machine),
            "measure": (MeasureRequest, self._measure),
        }

    def handle(self, method: str, payload: bytes) -> bytes:
        """Answer one call; raises `ExitAfterReply` if a contender has spoiled the process."""
        request, answer = self._methods[method]
        body = msgspec.json.encode(answer(msgspec.json.decode(payload, type=request)))
        if self._is_spoiled:
            raise ExitAfterReply(body)
        return body

    @cached_property
    def machine(self) -> MachineReply:
        """Found at first use, since CUDA does not survive a fork."""
        packages = {name: version for name in ("torch", "triton") if (version := installed(name))}
        if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
            return MachineReply(device="cpu", name=platform.processor() or platform.machine(), versions=packages)
        properties = torch.cuda.get_device_properties(0)
        return MachineReply(
            device="cuda",
            name=properties.name,
            l2_bytes=int(properties.L2_cache_size),
            processors=properties.multi_processor_count,
            capability=torch.cuda.get_device_capability(0),
            versions=packages | {"CUDA": str(torch.version.cuda)},
        )

    @property
    def _on_gpu(self) -> bool:
        return self.machine.device == "cuda"

    @property
    def _stopwatch(self) -> Stopwatch:
        return cuda_stopwatch if self._on_gpu else host_stopwatch

    def _declarations(self, request: DeclarationsRequest) -> DeclarationsReply:
        try:
            found = [kernel for target in request.targets for kernel in self._load(target)]
        except KernelLoadError as error:
            return DeclarationsReply([], error=str(error))
        return DeclarationsReply([kernel.declaration for kernel in found])

    def _load(self, target: str) -> list[Kernel]:
        kernels = load_kernels(target, folder=self._folder)
        self._kernels.update((kernel.declaration.target, kernel) for kernel in kernels)
        return kernels

    def _copy(self, request: CopyRequest) -> Timed:
        self._drawn = None
        return time_copy(
            request.nbytes,
            self.machine.device,
            self._stopwatch,
            l2_bytes=self.machine.l2_bytes,
            seconds=request.seconds,
            on_gpu=self._on_gpu,
        )

    def _measure(self, request: MeasureRequest) -> MeasureReply:
        sets = sets_beyond(self.machine.l2_bytes, bytes_to_move(request.shape)) if "cold" in request.l2 else 1
        if sets > MOST_SETS:
            sets, request = 1, msgspec.structs.replace(request, l2=tuple(one for one in request.l2 if one != "cold"))
            if not request.l2:
                return MeasureReply(status="unsupported", note="too small to be read from memory at each call")
        try:
            kernel = self._kernels.get(request.contender) or self._load(request.contender)[0]
            contender = Contender(kernel, request.shape, request.options)
            with as_not_measured():
                drawn = self._sets(contender, sets)
            reply = measure(contender, drawn, request, self._stopwatch, on_gpu=self._on_gpu)
            if reply.status != "ok":
                self._drawn = None  # which it may have changed
            return self._unless_replaced(reply)
        except Unsupported as why:
            return MeasureReply(status="unsupported", note=str(why))
        except Exception as error:  # noqa: BLE001 - whatever a kernel or a package raises is its result
            self._drawn = None
            self._is_spoiled = isinstance(error, CaptureFailed) or not self._device_answers()
            if isinstance(error, NotMeasured) and not self._is_spoiled:  # else it met what a launch had done
                return MeasureReply(status="unmeasured", note=f"attnfuzz could not prepare or check it: {error}"[:300])
            raised = (isinstance(error, NotMeasured) and error.__cause__) or error
            first_line = str(raised).strip().partition("\n")[0]
            return MeasureReply(status="failed", note=f"{type(raised).__name__}: {first_line}"[:300])

    def _unless_replaced(self, reply: MeasureReply) -> MeasureReply:
        """``reply``, or that a contender has replaced a clock or what checks it, after which nothing counts."""
        if (replaced := self._watch.replaced()) is None:
            return reply
        self._is_spoiled = True
        return MeasureReply(status="failed", note=f"the kernel, or its module, has replaced {replaced}"[:300])

    def _device_answers(self) -> bool:
        try:
            torch.zeros(1, dtype=torch.float32, device=self.machine.device).item()
        except RuntimeError:  # CUDA reports the same error to whatever comes after
            return False
        return True

    def _sets(self, contender: Contender, count: int) -> list[Any]:
        """The inputs of the request before, if it was for the same kernel and shape."""
        key = contender.declaration.target, contender.shape, contender.specs, count
        if self._drawn is None or self._drawn[0] != key:
            self._drawn = None
            if self._on_gpu:
                torch.cuda.empty_cache()
            self._drawn = (key, [contender.draw(self.machine.device, seed) for seed in range(count)])
        return self._drawn[1]
