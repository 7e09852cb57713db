"""The service that executors run: loads kernels and judges cases on them, one at a time or many at once."""

import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from attnfuzz.declaration import Kernel, KernelLoadError, load_kernels
from attnfuzz.execution.cause_lines import cause_lines
from attnfuzz.execution.compile_times import CompileTimes
from attnfuzz.execution.explain_messages import CauseLinesRequest, ExplainReply, ExplainRequest
from attnfuzz.execution.growth import GrowthTrial
from attnfuzz.execution.guard_messages import GuardReply, GuardRequest
from attnfuzz.execution.guard_probe import guarded_reply
from attnfuzz.execution.interpreter_setup import set_up_interpreter
from attnfuzz.execution.judge_messages import (
    DeclarationsReply,
    DeclarationsRequest,
    DeclaredReply,
    DeclaredRequest,
    DeviceReply,
    GrowthReply,
    GrowthRequest,
    JudgeManyReply,
    JudgeManyRequest,
    JudgeReply,
    JudgeRequest,
    PrepareReply,
    PrepareRequest,
    to_wire,
)
from attnfuzz.execution.service import ExitAfterReply
from attnfuzz.execution.watch import watch_if_asked
from attnfuzz.explaining.explain import explain_case
from attnfuzz.judging.judge import BatchLost, judge, judge_many
from attnfuzz.oracles.exception import EnvironmentProblem
from attnfuzz.oracles.verdict import Failure, OracleName, Verdict
from attnfuzz.problems.cases import decode_case
from attnfuzz.said import printable, text_of, type_name

__all__ = ["JudgingService"]

_LIBRARIES = ("torch", "triton", "numpy")

_GPU_SHARE = 0.1
_LEAST_GPU_BYTES = 4 << 30
"""Four runs of a case of the largest size, with their snapshots and its reference."""


class JudgingService:
    """Kernels are imported once per process. Methods: see `judge_messages`."""

    def __init__(self) -> None:
        set_up_interpreter()
        torch.set_num_threads(1)  # workers are the parallelism, and thread pools cost small tensors more than they give
        self._kernels: dict[str, Kernel] = {}
        self._compile_times = CompileTimes()
        self._compile_times.start_listening()
        self._device: str | None = None
        self._growth: tuple[GrowthRequest, GrowthTrial] | None = None
        self._watch = watch_if_asked()  # before any kernel is imported
        self._has_judged = False
        self._methods: dict[str, Callable[[bytes], msgspec.Struct]] = {
            "cause_lines": self._cause_lines,
            "declarations": self._declarations,
            "device": self._describe_device,
            "explain": self._explain,
            "growth": self._growth_after,
            "guarded": self._guarded,
            "judge": self._judge,
            "judge_many": self._judge_many,
            "prepare": self._prepare,
            "declared": self._declared,
        }

    def handle(self, method: str, payload: bytes) -> bytes:
        """Answer one call; raises `ExitAfterReply` if that leaves the process unusable."""
        if method not in self._methods:
            raise ValueError(f"method={method!r} must be one of {sorted(self._methods)}")
        reply = self._methods[method](payload)
        body = msgspec.json.encode(reply)
        if _is_last(reply):
            raise ExitAfterReply(body)
        return body

    @property
    def device(self) -> str:
        """ "cuda" if a GPU can be used, else "cpu"; decided at first use, since CUDA does not survive a fork."""
        if self._device is None:
            self._device = "cuda" if torch.cuda.is_available() else "cpu"
            if self._device == "cuda":
                _cap_gpu_memory()
        return self._device

    def _declarations(self, payload: bytes) -> DeclarationsReply:
        request = msgspec.json.decode(payload, type=DeclarationsRequest)
        try:
            kernels = [kernel for target in request.targets for kernel in self._load(target, request.within)]
        except KernelLoadError as error:
            return DeclarationsReply([], error=printable(str(error), lines=True))
        return DeclarationsReply([kernel.declaration for kernel in kernels])

    def _load(self, target: str, within: str | None = None) -> list[Kernel]:
        kernels = load_kernels(target, within=None if within is None else Path(within))
        self._kernels.update((kernel.declaration.target, kernel) for kernel in kernels)
        return kernels

    def _prepare(self, payload: bytes) -> PrepareReply:
        kernel = self._kernel(msgspec.json.decode(payload, type=PrepareRequest).target)
        try:
            if kernel.prepare is not None:
                kernel.prepare()
        except BaseException as error:  # noqa: BLE001 - the user's code; whatever it raises is told
            return PrepareReply(raised=f"{type_name(error)}: {text_of(error)}")
        return PrepareReply()

    def _declared(self, payload: bytes) -> DeclaredReply:
        request = msgspec.json.decode(payload, type=DeclaredRequest)
        self._kernels[request.target] = self._kernel(request.target).declared(
            supports=request.supports, numerics=request.numerics
        )
        return DeclaredReply()

    def _judge(self, payload: bytes) -> JudgeReply:
        request = msgspec.json.decode(payload, type=JudgeRequest)
        kernel = self._kernel(request.target)
        case = decode_case(kernel.declaration.problem, bytes(request.case))
        try:
            verdict = judge(
                kernel,
                case,
                device=self.device,
                oracles=request.oracles,
                tolerance=request.tolerance,
                thorough=request.thorough,
                relations=request.relations,
                catch_interrupt=True,
                compile_clock=self._compile_times.total_s,
            )
        except EnvironmentProblem as problem:
            return JudgeReply(environment=str(problem))
        except torch.OutOfMemoryError as error:  # not the kernel's: that one is a verdict
            return JudgeReply(exhausted=text_of(error).strip().partition("\n")[0])
        except Exception:
            if (replaced := self._replaced(request.oracles, at_once=True)) is None:
                raise
            verdict = Verdict(failure=replaced, fatal=True)
        if (replaced := self._replaced(request.oracles)) is not None:
            verdict = Verdict(failure=replaced, fatal=True)
        return JudgeReply(verdict=to_wire(verdict), gpu_share=self._gpu_share_held())

    def _judge_many(self, payload: bytes) -> JudgeManyReply:
        request = msgspec.json.decode(payload, type=JudgeManyRequest)
        kernel = self._kernel(request.target)
        try:
            verdicts = judge_many(
                kernel,
                [decode_case(kernel.declaration.problem, bytes(case)) for case in request.cases],
                device=self.device,
                oracles=request.oracles,
                tolerance=request.tolerance,
                relations=request.relations,
                catch_interrupt=True,
                compile_clock=self._compile_times.total_s,
            )
        except EnvironmentProblem as problem:
            return JudgeManyReply(environment=str(problem))
        except BatchLost as lost:
            return JudgeManyReply(lost=str(lost))
        except Exception:
            if (replaced := self._replaced(request.oracles, at_once=True)) is None:
                raise
            return JudgeManyReply(lost=replaced.message)
        if (replaced := self._replaced(request.oracles)) is not None:  # each case by itself tells that again
            return JudgeManyReply(lost=replaced.message)
        return JudgeManyReply(list(map(to_wire, verdicts)), gpu_share=self._gpu_share_held())

    def _replaced(self, oracles: Sequence[OracleName], *, at_once: bool = False) -> Failure | None:
        """An objection to what the kernel has replaced in this process; always looked for after its first cases."""
        if self._watch is None or "red_zone" not in oracles:
            return None
        at_once, self._has_judged = at_once or not self._has_judged, True
        return self._watch.objection(at_once=at_once)

    def _explain(self, payload: bytes) -> ExplainReply:
        request = msgspec.json.decode(payload, type=ExplainRequest)
        kernel = self._kernel(request.target)
        case = decode_case(kernel.declaration.problem, bytes(request.case))
        found = explain_case(kernel, case, device=self.device, oracle=request.oracle, seconds=request.seconds)
        return ExplainReply(found, last=self.device == "cuda")

    def _cause_lines(self, payload: bytes) -> ExplainReply:
        request = msgspec.json.decode(payload, type=CauseLinesRequest)
        kernel = self._kernel(request.target)
        case = decode_case(kernel.declaration.problem, bytes(request.case))
        compiled = self._compile_times.ttir_files
        return ExplainReply(cause_lines(kernel, case, request.replays, device=self.device, compiled=compiled))

    def _growth_after(self, payload: bytes) -> GrowthReply:
        request = msgspec.json.decode(payload, type=GrowthRequest)
        try:
            return GrowthReply(use=self._growth_trial(request).use_after(request.calls))
        except BaseException as error:  # noqa: BLE001 - whatever a kernel raises, other oracles have a word on it
            return GrowthReply(raised=f"{type_name(error)}: {text_of(error)}")

    def _growth_trial(self, request: GrowthRequest) -> GrowthTrial:
        """That of the last request if it was for the same case."""
        last = self._growth
        if last is None or (last[0].target, bytes(last[0].case)) != (request.target, bytes(request.case)):
            kernel = self._kernel(request.target)
            case = decode_case(kernel.declaration.problem, bytes(request.case))
            last = self._growth = request, GrowthTrial(kernel, case, device=self.device)
        return last[1]

    def _guarded(self, payload: bytes) -> GuardReply:
        request = msgspec.json.decode(payload, type=GuardRequest)
        kernel = self._kernel(request.target)
        case = decode_case(kernel.declaration.problem, bytes(request.case))
        return guarded_reply(kernel, case, request, device=self.device)

    def _gpu_share_held(self) -> float:
        """How much of the GPU memory that this process may use is taken by tensors."""
        if self.device != "cuda":
            return 0.0
        total = torch.cuda.get_device_properties().total_memory
        return torch.cuda.memory_allocated() / (_gpu_share(total) * total)

    def _kernel(self, target: str) -> Kernel:
        if target not in self._kernels:
            self._load(target)
        return self._kernels[target]

    def _describe_device(self, payload: bytes) -> DeviceReply:
        del payload
        name = torch.cuda.get_device_name() if self.device == "cuda" else _processor_name()
        torch.zeros(1, dtype=torch.float32, device=self.device).item()  # a GPU may be known by name and not answer
        versions = {"python": platform.python_version()} | {name: _version(name) for name in _LIBRARIES}
        return DeviceReply(self.device, name, versions)


def _is_last(reply: msgspec.Struct) -> bool:
    """Whether the process cannot be used after `reply`."""
    if isinstance(reply, JudgeReply):
        return bool(reply.exhausted) or (reply.verdict is not None and reply.verdict.fatal)
    if isinstance(reply, ExplainReply):
        return reply.last
    if isinstance(reply, GuardReply):
        return reply.fault is not None
    return isinstance(reply, JudgeManyReply) and reply.lost is not None


def _cap_gpu_memory() -> None:
    """Let a kernel that allocates without end fail soon, and leave the other executors on the GPU theirs."""
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction(_gpu_share(total))


def _gpu_share(total_bytes: int) -> float:
    """Of the GPU's memory, for one process."""
    return min(1.0, max(_GPU_SHARE, _LEAST_GPU_BYTES / total_bytes))


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor_name() -> str:
    """As Linux calls it; elsewhere the machine type."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
