"""The driver's way to measurements: a process that runs them, replaced when it dies. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from attnfuzz.bench.kernels.messages import (
    CopyReply,
    CopyRequest,
    MachineReply,
    MeasureReply,
    MeasureRequest,
    Timed,
)
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.isolation.devices import likely_device
from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.outcomes import ExecutorUnavailable, Reply
from attnfuzz.isolation.zygote_client import Zygote
from attnfuzz.judging.failures import failure_of
from attnfuzz.judging.messages import DeclarationsReply, DeclarationsRequest

__all__ = ["Crashed", "Laboratory"]

SERVICE = "attnfuzz.bench.kernels.service:TimingService"
_START_TIMEOUT_S = 300.0
_MEASURE_TIMEOUT_S = 300.0
"""Compiling FlexAttention for a new shape takes half a minute."""

_ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Its pool of compiler processes does not come to life in a forked process."""

Message = TypeVar("Message", bound=msgspec.Struct)


class Crashed(Exception):  # noqa: N818 - says what happened to the process
    """The process died of a measurement, or did not answer in time; the message says how."""


class Laboratory:
    """Measures on one device. A context manager; raises ExecutorUnavailable."""

    def __init__(self, device: str = "auto") -> None:
        self._zygote = Zygote.start(likely_device(device), service=SERVICE)
        try:
            self._executor = Executor(self._zygote, environment=_ENVIRONMENT)
            self.machine = self._must("machine", None, MachineReply)
            if device == "cuda" and self.machine.device != "cuda":
                raise ExecutorUnavailable("torch finds no GPU here; leave out --device cuda, or repair the driver")
        except BaseException:
            self._zygote.close()
            raise

    def declarations(self, targets: Sequence[str]) -> list[Declaration]:
        """The kernels that ``targets`` name, each once. Raises KernelLoadError."""
        try:
            reply = self._ask("declarations", DeclarationsRequest(list(targets)), DeclarationsReply, _START_TIMEOUT_S)
        except Crashed as how:
            raise KernelLoadError(f"importing {', '.join(targets)} failed: {how}") from how
        if reply.error is not None:
            raise KernelLoadError(reply.error)
        return list({declaration.target: declaration for declaration in reply.kernels}.values())

    def copy(self, nbytes: int, seconds: float) -> Timed:
        """The time of a copy that moves so many bytes."""
        return self._must("copy", CopyRequest(nbytes, seconds), CopyReply).time

    def measure(self, request: MeasureRequest) -> MeasureReply:
        """Raises Crashed."""
        return self._ask("measure", request, MeasureReply, _MEASURE_TIMEOUT_S)

    def close(self) -> None:
        """End the process."""
        self._executor.close()
        self._zygote.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _must(self, method: str, request: msgspec.Struct | None, reply: type[Message]) -> Message:
        try:
            return self._ask(method, request, reply, _START_TIMEOUT_S)
        except Crashed as how:
            raise ExecutorUnavailable(f"the device could not be used: {how}") from how

    def _ask(self, method: str, request: msgspec.Struct | None, reply: type[Message], timeout_s: float) -> Message:
        payload = b"{}" if request is None else msgspec.json.encode(request)
        outcome = self._executor.call(method, payload, timeout_s=timeout_s)
        if not isinstance(outcome, Reply):
            raise Crashed(failure_of(outcome).message)
        return msgspec.json.decode(outcome.body, type=reply)
