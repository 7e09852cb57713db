"""The service that executors run: loads kernels and judges cases on them, one at a time or many at once."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from attnfuzz.declaration import Absent, Builder, Kernel, KernelLoadError, absent_kernels, load_kernels
from attnfuzz.explaining.explain import explain_case
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.internal_errors import gpu_memory_ran_out
from attnfuzz.isolation.devices import VISIBLE
from attnfuzz.isolation.serve import ExitAfterReply
from attnfuzz.isolation.turns import Turns
from attnfuzz.judging.batch import BatchLost
from attnfuzz.judging.judge import judge, judge_batch
from attnfuzz.judging.messages import (
    BuildReply,
    BuildRequest,
    BuiltReply,
    BuiltRequest,
    DeclarationsReply,
    DeclarationsRequest,
    DeviceReply,
    DeviceRequest,
    ExplainReply,
    ExplainRequest,
    GrowthReply,
    GrowthRequest,
    GuardReply,
    GuardRequest,
    JudgeReply,
    JudgeRequest,
    LinesRequest,
    OnCase,
    PrepareReply,
    PrepareRequest,
    ScriptPartReply,
    ScriptPartRequest,
    to_wire,
)
from attnfuzz.judging.source_numbers import numbers_in_source
from attnfuzz.judging.special_runs import GrowthTrial, access_lines, cause_lines, guarded_reply
from attnfuzz.judging.tampering import Group, Watch, of_attnfuzz
from attnfuzz.memory.kept import buffers_of_modules
from attnfuzz.oracles import exception, registry
from attnfuzz.oracles.exception import EnvironmentProblem
from attnfuzz.oracles.own import OracleError
from attnfuzz.oracles.relations import configurations
from attnfuzz.problems.cases import Case, decode_case
from attnfuzz.problems.limits import case_nbytes, check_size
from attnfuzz.problems.open_cases import OpenCase, ProblemError
from attnfuzz.project import working_folder
from attnfuzz.trials.engine_calls import NotFollowed, engine_calls
from attnfuzz.trials.observation import KernelRaised
from attnfuzz.trials.open_script import open_script_part
from attnfuzz.trials.script_part import MAX_TENSOR_BYTES
from attnfuzz.triton_compat.compiling import CompileTimes
from attnfuzz.triton_compat.interpreter import set_up_interpreter
from attnfuzz.untrusted_text import printable, text_of, type_name
from attnfuzz.verdict import Failure, Verdict

_LIBRARIES = ("torch", "triton", "numpy")

_WEAR_PART = 0.25
_MOST_WEAR_S = 1.0

_GPU_SHARE = 0.1
_LEAST_GPU_BYTES = 4 << 30
"""Four runs of a case of the largest size, with their snapshots and its reference."""


class JudgingService:
    """Kernels are imported once per process. Methods: see `judge_messages`. ``own_code``: see `Watch`."""

    def __init__(self, own_code: Iterable[Group] | None = None) -> None:
        set_up_interpreter()
        torch.set_num_threads(1)  # workers are the parallelism, and thread pools cost small tensors more than they give
        self._kernels: dict[str, Kernel] = {}
        self._compile_times = CompileTimes()
        self._compile_times.start_listening()
        self._device: str | None = None
        self._growth: tuple[tuple[str, bytes], GrowthTrial] | None = None
        self._folder = working_folder()
        self._watch = Watch(own_code)  # before any kernel is imported
        self._has_judged = False
        self._worn: dict[str, tuple[int, GrowthTrial]] = {}
        self._builder: Builder | None = None
        self._methods: dict[str, tuple[type[msgspec.Struct], Callable[[Any], msgspec.Struct]]] = {
            "build": (BuildRequest, self._build),
            "built": (BuiltRequest, self._built),
            "declarations": (DeclarationsRequest, self._declarations),
            "device": (DeviceRequest, self._describe_device),
            "script_part": (ScriptPartRequest, self._script_part),
            "explain": (ExplainRequest, self._explain),
            "growth": (GrowthRequest, self._growth_after),
            "guarded": (GuardRequest, self._guarded),
            "judge": (JudgeRequest, self._judge),
            "lines": (LinesRequest, self._lines),
            "prepare": (PrepareRequest, self._prepare),
        }

    def handle(self, method: str, payload: bytes) -> bytes:
        """Answer one call; raises `ExitAfterReply` if that leaves the process unusable."""
        if method not in self._methods:
            raise ValueError(f"method={method!r} must be one of {sorted(self._methods)}")
        request, answer = self._methods[method]
        reply = answer(msgspec.json.decode(payload, type=request))
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
                _start_cuda()
        return self._device

    def _declarations(self, request: DeclarationsRequest) -> DeclarationsReply:
        kernels: list[Kernel] = []
        absent: list[Absent] = []
        try:
            for target in request.targets:
                missing = absent_kernels(target) if request.absent else []
                absent += missing
                try:
                    kernels += self._load(target, request.within)
                except KernelLoadError:
                    if not missing:
                        raise
        except KernelLoadError as error:
            return DeclarationsReply([], error=printable(str(error), lines=True))
        if (contract := request.contract) is not None:
            (target,) = request.targets
            changes = {"supports": contract.supports, "numerics": contract.numerics}
            self._kernels[target] = self._kernels[target].declared(**changes)
        if request.known:
            return DeclarationsReply([kernel.declaration for kernel in kernels])
        return DeclarationsReply(
            [msgspec.structs.replace(kernel.declaration, lengths=numbers_in_source(kernel)) for kernel in kernels],
            absent=[msgspec.structs.replace(one, why=printable(one.why)) for one in absent],
        )

    def _load(self, target: str, within: str | None = None) -> list[Kernel]:
        with buffers_of_modules():
            kernels = load_kernels(target, within=None if within is None else Path(within), folder=self._folder)
        self._kernels.update((kernel.declaration.target, kernel) for kernel in kernels)
        return kernels

    def _prepare(self, request: PrepareRequest) -> PrepareReply:
        kernel = self._kernel(request.target)
        try:
            if kernel.prepare is not None:
                with buffers_of_modules():
                    kernel.prepare()
        except BaseException as error:  # noqa: BLE001 - the user's code; whatever it raises is told
            return PrepareReply(raised=f"{type_name(error)}: {text_of(error)}")
        return PrepareReply()

    def _build(self, request: BuildRequest) -> BuildReply:
        calls = []
        for target, encoded in request.cases:
            kernel = self._kernel(target)
            if kernel.engine_plan is None or (builder := kernel.engine_plan.builder) is None:
                raise ValueError(f"{target} has no builder")
            self._builder = builder
            case = decode_case(kernel.declaration.problem, bytes(encoded))
            calls.append(partial(_call_once, kernel, case, self.device))
        if self._builder is None:
            raise ValueError("there is nothing to build")
        missing = self._builder.begin(calls)
        return BuildReply(missing, self._builder.modules, self._builder.folder, self._builder.setting)

    def _built(self, _: BuiltRequest) -> BuiltReply:
        if self._builder is None:
            raise ValueError("nothing has been begun")
        is_over = self._builder.is_over  # asked first: what is built last counts
        return BuiltReply(self._builder.built, is_over)

    def _judge(self, request: JudgeRequest) -> JudgeReply:
        began = time.perf_counter()
        is_first, self._has_judged = not self._has_judged, True
        try:
            verdicts = self._verdicts(request)
            objection = self._objection(request, at_once=is_first)
        except (EnvironmentProblem, OracleError) as problem:
            return JudgeReply(environment=str(problem))
        except ProblemError as problem:
            return JudgeReply(problem=str(problem))
        except BatchLost as lost:
            return JudgeReply(lost=str(lost))
        except torch.OutOfMemoryError as error:  # not the kernel's: that one is a verdict
            return JudgeReply(lost=text_of(error).strip().partition("\n")[0])
        except Exception as error:
            if full := gpu_memory_ran_out(text_of(error)):
                return JudgeReply(lost=full)
            objection = exception.left_error(error)
            if objection is not None and not is_first:  # perhaps of a kernel judged before: a fresh process had none
                return JudgeReply(lost=objection.message)
            if objection is None and (objection := self._watch.behind(error)) is None:
                raise
        if objection is not None and request.together:  # each case by itself tells that again
            return JudgeReply(lost=objection.message)
        if objection is not None and objection.oracle not in request.oracles:
            return JudgeReply(environment=objection.message)
        if objection is not None:
            verdicts = [Verdict(failure=objection, fatal=True)]
        elif request.watched and all(verdict.failure is None for verdict in verdicts):
            worn = self._wear(request, time.perf_counter() - began)
            verdicts = verdicts if worn is None else [worn, *verdicts[1:]]
        return JudgeReply(list(map(to_wire, verdicts)), gpu_share=self._gpu_share_held())

    def _verdicts(self, request: JudgeRequest) -> list[Verdict]:
        kernel = self._kernel(request.target)
        cases = [decode_case(kernel.declaration.problem, bytes(case)) for case in request.cases]
        settings: dict[str, Any] = {
            "device": self.device,
            "oracles": request.oracles,
            "tolerance": request.tolerance,
            "run_twice": request.run_twice,
            "inquire": request.inquire,
            "relations": request.relations,
            "catch_interrupt": True,
            "compile_clock": self._compile_times.total_s,
        }
        if request.together:
            return judge_batch(kernel, cases, **settings)
        return [judge(kernel, case, **settings) for case in cases]

    def _wear(self, request: JudgeRequest, judging_s: float) -> Verdict | None:
        """Call the kernel without a look at results, on the smallest case so far, for a part of the time of judging.

        So one process sees thousands of calls within a minute, and what it judges later shows what a kernel does that
        was right as often as checkers call it. The verdict on what the kernel raises meanwhile, if it does.
        """
        kernel = self._kernel(request.target)
        cases = [decode_case(kernel.declaration.problem, bytes(case)) for case in request.cases]
        smallest = min(cases, key=case_nbytes)
        known = self._worn.get(request.target)
        if known is None or case_nbytes(smallest) < known[0]:
            known = case_nbytes(smallest), GrowthTrial(kernel, smallest, device=self.device)
            self._worn[request.target] = known
        until = time.perf_counter() + min(_MOST_WEAR_S, _WEAR_PART * judging_s)
        try:
            while time.perf_counter() < until:
                known[1].call()
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is its verdict, and may come but once
            return exception.verdict(KernelRaised(error, "nan"), request.oracles)
        return None

    def _objection(self, request: JudgeRequest, *, at_once: bool) -> Failure | None:
        """To what a kernel has replaced in this process, where that is watched; looked for now and then, or at once."""
        if not request.watched or registry.RED_ZONE.name not in request.oracles:
            return None
        return self._watch.objection(at_once=at_once)

    def _explain(self, request: ExplainRequest) -> ExplainReply:
        kernel, case = self._kernel_and_case(request)
        try:
            found = explain_case(kernel, case, device=self.device, oracle=request.oracle, seconds=request.seconds)
            of_configurations = configurations.lines_of(kernel, case, device=self.device)
            found = msgspec.structs.replace(found, lines=(*found.lines, *of_configurations))
        except Exception as error:
            if (unexplained := self._unexplained(error)) is None:
                raise
            return unexplained
        return ExplainReply(found, last=self.device == "cuda")

    def _unexplained(self, error: Exception) -> ExplainReply | None:
        """The verdict where the kernel is behind an ``error``; None where the error is attnfuzz's own."""
        if (failure := exception.left_error(error) or self._watch.behind(error)) is None:
            return None
        return ExplainReply(Explanation(lines=(f"nothing can be measured: {failure.message}",)), last=True)

    def _lines(self, request: LinesRequest) -> ExplainReply:
        kernel, case = self._kernel_and_case(request)
        try:
            if request.question is not None:
                return ExplainReply(access_lines(kernel, case, request.question, request.tensors, device=self.device))
            compiled = self._compile_times.ttir_files
            return ExplainReply(cause_lines(kernel, case, request.replays, device=self.device, compiled=compiled))
        except Exception as error:
            if (unexplained := self._unexplained(error)) is None:
                raise
            return unexplained

    def _growth_after(self, request: GrowthRequest) -> GrowthReply:
        try:
            return GrowthReply(use=self._growth_trial(request).use_after(request.calls))
        except BaseException as error:  # noqa: BLE001 - whatever a kernel raises, other oracles have a word on it
            return GrowthReply(raised=f"{type_name(error)}: {text_of(error)}")

    def _growth_trial(self, request: GrowthRequest) -> GrowthTrial:
        """The trial of the last request if it was for the same case."""
        key = request.target, bytes(request.case)
        if self._growth is None or self._growth[0] != key:
            self._growth = key, GrowthTrial(*self._kernel_and_case(request), device=self.device)
        return self._growth[1]

    def _script_part(self, request: ScriptPartRequest) -> ScriptPartReply:
        kernel, case = self._kernel_and_case(request)
        try:
            if isinstance(case, OpenCase):
                check_size(case, MAX_TENSOR_BYTES)
                return ScriptPartReply(open_script_part(kernel, case, device=self.device))
            return ScriptPartReply(engine_calls(kernel, case, device=self.device, launches=request.launches))
        except NotFollowed:
            return ScriptPartReply(None)

    def _guarded(self, request: GuardRequest) -> GuardReply:
        return guarded_reply(*self._kernel_and_case(request), request, device=self.device)

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

    def _kernel_and_case(self, request: OnCase) -> tuple[Kernel, Case]:
        kernel = self._kernel(request.target)
        return kernel, decode_case(kernel.declaration.problem, bytes(request.case))

    def _describe_device(self, _: DeviceRequest) -> DeviceReply:
        name = torch.cuda.get_device_name() if self.device == "cuda" else _processor_name()
        torch.zeros(1, dtype=torch.float32, device=self.device).item()  # a GPU may be known by name and not answer
        versions = {"python": platform.python_version()} | {name: _version(name) for name in _LIBRARIES}
        return DeviceReply(self.device, name, versions)


def _call_once(kernel: Kernel, case: Case, device: str) -> None:
    GrowthTrial(kernel, case, device=device).call()


def _is_last(reply: msgspec.Struct) -> bool:
    """Whether the process cannot be used after `reply`."""
    match reply:
        case JudgeReply():
            return reply.lost is not None or any(verdict.fatal for verdict in reply.verdicts)
        case ExplainReply():
            return reply.last
        case GuardReply():
            return reply.fault is not None
    return False


_TURNS = Turns()
"""At starting CUDA, of all executors of a zygote, which imports this module."""


def _start_cuda() -> None:
    """Have a context made, which takes longer for everybody the more processes do it at once."""
    with _TURNS.turn(os.environ.get(VISIBLE, "")):
        # a kernel that allocates without end fails soon, and leaves the other executors on the GPU theirs
        total = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(_gpu_share(total))
        torch.zeros(1, dtype=torch.float32, device="cuda").item()


def _gpu_share(total_bytes: int) -> float:
    """Share of the GPU's memory for one process."""
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


in_executor = partial(JudgingService, tuple(of_attnfuzz()))
"""Makes the service of an executor that is forked from the process that imports this module."""
