"""The service of the process that runs what is timed: it may die of it, and then only that contender has no times."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from attnfuzz.bench.kernels.contender import Contender, NotMeasured, Unsupported, as_not_measured, measure
from attnfuzz.bench.kernels.shapes import (
    CopyReply,
    CopyRequest,
    MachineReply,
    MeasureReply,
    MeasureRequest,
    bytes_to_move,
)
from attnfuzz.bench.kernels.timing import (
    MOST_SETS,
    CaptureFailed,
    CudaStopwatch,
    HostStopwatch,
    Stopwatch,
    sets_beyond,
    time_copy,
)
from attnfuzz.declaration import Kernel, KernelLoadError, load_kernels
from attnfuzz.environment import installed
from attnfuzz.isolation.serve import ExitAfterReply
from attnfuzz.judging.messages import DeclarationsReply, DeclarationsRequest
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
        self._methods: dict[str, Callable[[bytes], msgspec.Struct]] = {
            "copy": self._copy,
            "declarations": self._declarations,
            "machine": self._machine,
            "measure": self._measure,
        }

    def handle(self, method: str, payload: bytes) -> bytes:
        """Answer one call; raises `ExitAfterReply` if a contender has spoiled the process."""
        reply = self._methods[method](payload)
        body = msgspec.json.encode(reply)
        if self._is_spoiled:
            raise ExitAfterReply(body)
        return body

    @property
    def _on_gpu(self) -> bool:
        return os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available()

    @property
    def _device(self) -> str:
        return "cuda" if self._on_gpu else "cpu"

    @property
    def _l2_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(0).L2_cache_size) if self._on_gpu else 0

    @property
    def _stopwatch(self) -> Stopwatch:
        return CudaStopwatch() if self._on_gpu else HostStopwatch()

    def _machine(self, payload: bytes) -> MachineReply:
        del payload
        packages = {name: version for name in ("torch", "triton") if (version := installed(name))}
        if not self._on_gpu:
            return MachineReply(device="cpu", name=platform.processor() or platform.machine(), versions=packages)
        properties = torch.cuda.get_device_properties(0)
        return MachineReply(
            device="cuda",
            name=properties.name,
            l2_bytes=self._l2_bytes,
            processors=properties.multi_processor_count,
            capability=torch.cuda.get_device_capability(0),
            versions=packages | {"CUDA": str(torch.version.cuda)},
        )

    def _declarations(self, payload: bytes) -> DeclarationsReply:
        request = msgspec.json.decode(payload, type=DeclarationsRequest)
        try:
            found = [kernel for target in request.targets for kernel in self._load(target)]
        except KernelLoadError as error:
            return DeclarationsReply([], error=str(error))
        return DeclarationsReply([kernel.declaration for kernel in found])

    def _load(self, target: str) -> list[Kernel]:
        kernels = load_kernels(target, folder=self._folder)
        self._kernels.update((kernel.declaration.target, kernel) for kernel in kernels)
        return kernels

    def _copy(self, payload: bytes) -> CopyReply:
        request = msgspec.json.decode(payload, type=CopyRequest)
        self._drawn = None
        timed = time_copy(
            request.nbytes,
            self._device,
            self._stopwatch,
            l2_bytes=self._l2_bytes,
            seconds=request.seconds,
            on_gpu=self._on_gpu,
        )
        return CopyReply(timed)

    def _measure(self, payload: bytes) -> MeasureReply:
        request = msgspec.json.decode(payload, type=MeasureRequest)
        sets = sets_beyond(self._l2_bytes, bytes_to_move(request.shape)) if "cold" in request.l2 else 1
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
            torch.zeros(1, dtype=torch.float32, device=self._device).item()
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
            self._drawn = (key, [contender.draw(self._device, seed) for seed in range(count)])
        return self._drawn[1]
