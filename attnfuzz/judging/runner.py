"""The driver's way to a verdict: kernels run in an executor, whose death is a verdict too. Torch-free."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.explaining.accesses import question_of
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.isolation.builds import GiveUp
from attnfuzz.isolation.devices import Device, likely_device
from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.outcomes import Died, ExecutorUnavailable, Reply, ServiceError, TimedOut
from attnfuzz.isolation.process import resident_bytes
from attnfuzz.isolation.zygote_client import Zygote
from attnfuzz.judging.executor_deaths import failure_of
from attnfuzz.judging.leaks import MemoryUse, find_leak
from attnfuzz.judging.loaded_kernels import LOAD_TIMEOUT_S, START_TIMEOUT_S, LoadedKernels
from attnfuzz.judging.messages import (
    BuildReply,
    BuildRequest,
    BuiltReply,
    DeclarationsRequest,
    DeviceReply,
    ExplainReply,
    ExplainRequest,
    GrowthReply,
    GrowthRequest,
    GuardReply,
    GuardRequest,
    JudgeReply,
    JudgeRequest,
    LinesRequest,
    ScriptPartReply,
    ScriptPartRequest,
    from_wire,
)
from attnfuzz.oracles.registry import ACCURACY, CRASH, DEFAULT_ORACLES, UNWRITTEN, OracleName
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.declared_numerics import Tolerance
from attnfuzz.problems.limits import CaseTooLarge, check_size
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.trials.script_part import ScriptPart
from attnfuzz.verdict import Failure, Relations, Verdict

SERVICE = "attnfuzz.judging.service:in_executor"
DEFAULT_TIMEOUT_S: dict[Device, float] = {"cpu": 10.0, "cuda": 60.0}
"""For judging one case; on a GPU that includes compiling the kernel."""

_TIMES_FOR_ALL = 4.0
"""How much longer all relations may take: up to thirty runs in place of two, for far more of which a limit allows."""

_MAX_ZYGOTE_RESTARTS = 20
"""Most restarts of zygotes that died within seconds of their start: a minute's worth."""


class ProblemUnusable(ExecutorUnavailable):
    """A problem of a user's file fails itself: none of its kernels can be judged, on this case at least."""


def start_executor(zygote: Zygote, environment: Mapping[str, str], targets: Sequence[str] = ()) -> Executor:
    """An executor that has started its device and imported kernels, for a `Runner` whose settings are not known yet.

    What there is to say of a device that does not answer, and of kernels, the runner says. Raises
    `ExecutorUnavailable`.
    """
    executor = Executor(zygote, environment=environment)
    with suppress(ServiceError):  # the runner asks again, and says so then
        executor.call("device", b"{}", timeout_s=START_TIMEOUT_S)
        if targets:
            request = msgspec.json.encode(DeclarationsRequest(list(targets), known=True))
            executor.call("declarations", request, timeout_s=START_TIMEOUT_S)
    return executor


class Runner:
    """Judges cases on kernels, in a process that may die of it. A context manager; not for several threads."""

    def __init__(
        self,
        *,
        device: str = "auto",
        oracles: Sequence[OracleName] = DEFAULT_ORACLES,
        tolerance: Tolerance = "bound",
        timeout_s: float | None = None,
        memory_limit_bytes: int | None = None,
        environment: Mapping[str, str] | None = None,
        zygote: Zygote | None = None,
        prepared: set[str] | None = None,
        python: Path | None = None,
        watching: bool = False,
        import_patience_s: float = LOAD_TIMEOUT_S,
        meanwhile: Callable[[], None] | None = None,
        forked: Callable[[Zygote], None] | None = None,
        executor: Executor | None = None,
        wait: bool = True,
    ) -> None:
        """`device`: "auto" takes a GPU if there is one. `timeout_s` bounds one case, `DEFAULT_TIMEOUT_S` if None.

        `memory_limit_bytes` bounds the executor's resident memory. `environment` is set in the executor before CUDA is
        initialised: that of a `DeviceLease` pins it to one GPU. `zygote`: where executors come from, started with
        `service=SERVICE` and for `device`; the caller closes it. `prepared`: targets of kernels that another runner has
        prepared. `python`: the interpreter of executors, see `Zygote.start`; of a `zygote` it is what that was started
        with. `watching`: kernels fail that replace what judges or times them (`JudgeRequest.watched`).
        `import_patience_s`: how long the import of a kernel may do nothing. `meanwhile` is called while torch is
        imported where executors come from, `forked` with these once the runner has its own. `executor`: one from
        `start_executor` with the same `environment`, in place of a fresh one. With `wait=False`, of "cpu", whoever
        asks first waits until all is imported, and is told what goes wrong there. Raises `ExecutorUnavailable`, also
        for "cuda" without a GPU.
        """
        if device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device={device!r} must be 'auto', 'cpu' or 'cuda'")
        self.oracles = tuple(oracles)
        self.tolerance = tolerance
        self._owns_zygote = zygote is None
        self._memory_limit_bytes = memory_limit_bytes
        self._executor_environment = dict(environment or {})
        self.gpu_share = 0.0
        """How much of the GPU memory that it may use the executor still held after its latest answer, from 0 to 1."""
        self.lost: Failure | None = None
        self._python = python
        self._watching = watching
        self.zygote = zygote or self._start_zygote(likely_device(device))
        if meanwhile is not None:
            meanwhile()
        self._executor = executor or self._new_executor(wait=wait)
        self._executor.memory_limit_bytes = memory_limit_bytes
        if forked is not None:
            forked(self.zygote)
        self.device: Device = self._settle_device(device)
        self.kernels = LoadedKernels(self._executor, self.device, prepared, import_patience_s=import_patience_s)
        """The kernels that the present executor has imported."""
        self.timeout_s = DEFAULT_TIMEOUT_S[self.device] if timeout_s is None else timeout_s

    @cached_property
    def environment(self) -> DeviceReply:
        """Device, its name and the versions of Python, torch, Triton and NumPy."""
        outcome = self._executor.call("device", b"{}", timeout_s=LOAD_TIMEOUT_S)
        if not isinstance(outcome, Reply):
            raise ExecutorUnavailable(f"the device could not be initialised: {failure_of(outcome).message}")
        reply = outcome.read(DeviceReply)
        if reply is None:
            raise ExecutorUnavailable("the executor does not say which device it has; start again")
        return reply

    @property
    def device_name(self) -> str:
        """The name of the processor or GPU."""
        return self.environment.name

    @property
    def is_ready(self) -> bool:
        """Whether no case would have to wait until torch is imported where executors come from."""
        return self.zygote.is_ready

    @property
    def restarts(self) -> int:
        """How many executors have been replaced: they died, hung, lost their GPU, or were told to end."""
        return self._executor.restarts

    @property
    def pid(self) -> int | None:
        """The executor's process ID; None after it died, until the next call."""
        return self._executor.pid

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the executor as it is now."""
        return resident_bytes(self._executor.pid) or 0 if self._executor.pid is not None else 0

    @property
    def memory_bytes(self) -> int:
        """Memory that counts against the executor's limit: its own and, as of a moment ago, that of its children."""
        return self._executor.memory_bytes

    def declarations(self, targets: Sequence[str], *, within: Path | None = None) -> list[Declaration]:
        """Declarations of all kernels that `targets` name. Raises `KernelLoadError` in one sentence.

        `within`: the root of the project that they must lie in, where not the user but a file names them.
        """
        return self.kernels.declarations(targets, within=within)

    def prepare(self, declarations: Sequence[Declaration]) -> list[Declaration]:
        """Prepare these kernels: wherever they are judged, that will not be done again.

        Raises `KernelLoadError` where a kernel cannot be, `DeadlinePassed` where that was given up, and
        `ExecutorUnavailable`.
        """
        for declaration in declarations:
            if declaration.needs_preparing:
                self.kernels.prepare(declaration)
        return [msgspec.structs.replace(declaration, needs_preparing=False) for declaration in declarations]

    def begin_builds(self, cases: Sequence[tuple[Declaration, Case]]) -> BuildReply | None:
        """Have the executor build, as one job in the background, all that kernels of one engine need for ``cases``.

        It judges nothing afterwards. None where it does not say what is built. Raises `ExecutorUnavailable`, and
        `ServiceError`.
        """
        encoded = [(declaration.target, msgspec.Raw(encode_case(case))) for declaration, case in cases]
        return self.kernels.begin_builds(BuildRequest(encoded))

    def built(self) -> BuiltReply | None:
        """How far that has come; None where the executor does not say, which then is at an end."""
        return self.kernels.built()

    def give_up_builds(self, when: GiveUp) -> None:
        """Wait for no build of a kernel any more when ``when`` says so; siblings that are made later do the same."""
        self.kernels.give_up = when

    def judge(
        self,
        declaration: Declaration,
        case: Case,
        *,
        timeout_s: float | None = None,
        run_twice: bool = True,
        inquire: bool = False,
        relations: Relations = None,
    ) -> Verdict:
        """The verdict on one case. A dead executor is a failure of the oracle `CRASH`, a late one of `HANG`.

        `run_twice=False` believes a first run that is right (see `attnfuzz.judging.judge`): a case that passes takes
        half the time. `inquire`: mistakes behind a failure are told apart by runs on neighbouring cases (see there,
        too). `relations`: which of them judge a case that passes otherwise. Importing the kernel does not
        count against `timeout_s`, which is longer for all relations.

        The time of a kernel that is built when it is called does not count (see `attnfuzz.isolation.builds`).

        Raises `CaseTooLarge`, also if the GPU has no memory for it, `KernelLoadError`, `ExecutorUnavailable` (the
        environment cannot run kernels), `ProblemUnusable` where a user's problem fails itself, `DeadlinePassed` where
        `give_up_builds` ended a build, and `ServiceError` for a bug of the framework, after which cases have a fresh
        process: what kernels have written into this one may be behind it.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        timeout_s *= _TIMES_FOR_ALL if relations == "all" else 1.0
        request = self._request(declaration, [case], run_twice=run_twice, inquire=inquire, relations=relations)
        reply, built_s = self._ask(declaration, request, timeout_s)
        if isinstance(reply, JudgeReply) and reply.lost is not None:  # a fresh process has the memory to itself
            reply, built_s = self._ask(declaration, request, timeout_s)
        if not isinstance(reply, JudgeReply):
            failure = failure_of(reply)
            return Verdict(failure=failure if failure.oracle in self.oracles else None)
        if reply.lost is not None:
            raise CaseTooLarge(f"the case does not fit into the GPU's memory; free some there: {reply.lost}")
        if not reply.verdicts:
            raise ExecutorUnavailable("the executor cannot judge")
        return _with_builds(from_wire(reply.verdicts[0]), built_s)

    def judge_together(
        self, declaration: Declaration, cases: Sequence[Case], *, timeout_s: float, relations: Relations = None
    ) -> list[Verdict] | None:
        """The verdict on each of `cases`, as `judge`, at a fraction of the time on a GPU, all within `timeout_s`.

        None where the batch is lost: it hung, took its process down or cost it the GPU. Then `lost` says how, and the
        caller decides about judging each case alone. Raises as `judge` does, whichever case it is for.
        """
        self.lost = None
        request = self._request(declaration, cases, relations=relations, together=True)
        reply, built_s = self._ask(declaration, request, timeout_s)
        if not isinstance(reply, JudgeReply):
            self.lost = failure_of(reply)
        if not isinstance(reply, JudgeReply) or reply.lost is not None:
            return None
        if len(reply.verdicts) != len(cases):
            return None
        verdicts = list(map(from_wire, reply.verdicts))
        return [_with_builds(verdict, 0.0 if i else built_s) for i, verdict in enumerate(verdicts)]

    def find_leak(self, declaration: Declaration, case: Case, *, timeout_s: float | None = None) -> Failure | None:
        """The failure of a kernel that keeps more memory with every call on `case`; None if it does not.

        Runs in a fresh executor, and leaves one. `timeout_s` is for the calls between two looks at the memory.
        """
        if CRASH.name not in self.oracles:
            return None
        encoded = msgspec.Raw(encode_case(case))
        if not self.kernels.is_fresh:
            self.restart()
        try:
            return find_leak(lambda calls: self._use_after(declaration, encoded, calls, timeout_s))
        finally:
            self.restart()

    def explain(
        self, declaration: Declaration, case: Case, *, seconds: float, oracle: OracleName = ACCURACY.name
    ) -> Explanation:
        """Explain a case that `oracle` objects to by variations of it; no run begins after so many `seconds`.

        Where the kernel ends its process, or hangs, that is what the explanation says. Raises what `judge` raises.
        """
        check_size(case)
        request = ExplainRequest(declaration.target, msgspec.Raw(encode_case(case)), oracle, seconds)
        reply = self.kernels.call(declaration, "explain", request, ExplainReply, timeout_s=seconds + self.timeout_s)
        if isinstance(reply, ExplainReply):
            return reply.explanation
        return Explanation(lines=(f"the weights of tokens cannot be measured: {failure_of(reply).message}",))

    def cause_lines(self, declaration: Declaration, case: Case, replays: Sequence[str]) -> Explanation:
        """The lines at which the kernel makes one of the roundings `replays` (`Failure.replays`): see `_lines`."""
        return self._lines(declaration, case, replays=tuple(replays)) if replays else Explanation()

    def access_lines(self, declaration: Declaration, case: Case, failure: Failure) -> Explanation:
        """The lines at which the kernel touches what ``failure`` is about: see `_lines`."""
        if (question := question_of(failure)) is None:
            return Explanation()
        tensors = (failure.tensor,) if failure.tensor and question != UNWRITTEN.name else ()
        return self._lines(declaration, case, question=question, tensors=tensors)

    def _lines(self, declaration: Declaration, case: Case, **wanted: Any) -> Explanation:
        """Lines of the kernel, as `sources`: none if they are not known, or the process does not live to tell.

        Runs the case in a fresh executor, where nothing else has been compiled, and in which the kernel has kept
        nothing. Raises what `judge` raises.
        """
        check_size(case)
        if not self.kernels.is_fresh:
            self.restart()
        request = LinesRequest(declaration.target, msgspec.Raw(encode_case(case)), **wanted)
        reply = self.kernels.call(declaration, "lines", request, ExplainReply, timeout_s=self.timeout_s)
        return reply.explanation if isinstance(reply, ExplainReply) else Explanation()

    def guarded(self, declaration: Declaration, request: GuardRequest) -> GuardReply | None:
        """The reply of a run with chosen tensors guarded; None if it ended in any other way than by a lost GPU."""
        reply = self.kernels.call(declaration, "guarded", request, GuardReply, timeout_s=self.timeout_s)
        return reply if isinstance(reply, GuardReply) else None

    def script_part(self, declaration: Declaration, case: Case, *, launches: bool) -> ScriptPart | None:
        """The script's part about ``case``; an engine's last function is called only if it ``launches``.

        None where that cannot be told, or the process does not live to tell it. Raises what `judge` raises.
        """
        if not isinstance(case, OpenCase):  # of which only a process that has imported its problem knows the size
            check_size(case)
        request = ScriptPartRequest(declaration.target, msgspec.Raw(encode_case(case)), launches)
        reply = self.kernels.call(declaration, "script_part", request, ScriptPartReply, timeout_s=self.timeout_s)
        return reply.part if isinstance(reply, ScriptPartReply) else None

    def restart(self) -> None:
        """Go on in a fresh executor."""
        self._executor.restart()
        self.gpu_share = 0.0

    def sibling(self, *, memory_limit_bytes: int | None = None) -> "Runner":
        """Another runner with the same settings and its own executor, from the same zygote: close it first.

        `memory_limit_bytes`: if it is to have another limit.
        """
        return self._beside(memory_limit_bytes=memory_limit_bytes)

    def heir(self) -> "Runner":
        """As `sibling`, with this runner's executor, which has started its device and imported kernels; this one goes
        on with a fresh one."""
        made = self._beside(executor=self._executor)
        made.kernels = self.kernels
        self._executor = self._new_executor()
        self.kernels = LoadedKernels(
            self._executor, self.device, made.kernels.prepared, import_patience_s=made.kernels.import_patience_s
        )
        return made

    def _beside(self, *, memory_limit_bytes: int | None = None, executor: Executor | None = None) -> "Runner":
        made = Runner(
            device=self.device,
            oracles=self.oracles,
            tolerance=self.tolerance,
            timeout_s=self.timeout_s,
            memory_limit_bytes=memory_limit_bytes or self._memory_limit_bytes,
            environment=self._executor_environment,
            zygote=self.zygote,
            prepared=self.kernels.prepared,
            watching=self._watching,
            import_patience_s=self.kernels.import_patience_s,
            executor=executor,
        )
        made.give_up_builds(self.kernels.give_up)
        return made

    def close(self) -> None:
        """End the executor and, unless it was given, the zygote."""
        self._executor.close()
        if self._owns_zygote:
            self.zygote.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _start_zygote(self, device: Device) -> Zygote:
        return Zygote.start(device, service=SERVICE, max_restarts=_MAX_ZYGOTE_RESTARTS, python=self._python, wait=False)

    def _new_executor(self, *, wait: bool = True) -> Executor:
        try:
            return Executor(
                self.zygote,
                environment=self._executor_environment,
                memory_limit_bytes=self._memory_limit_bytes,
                wait=wait,
            )
        except BaseException:
            if self._owns_zygote:
                self.zygote.close()
            raise

    def _settle_device(self, wanted: str) -> Device:
        """The device that executors have; starts over on the CPU where "auto" finds a driver but no usable GPU."""
        if wanted == "cpu" or (wanted == "cuda" and not self._owns_zygote):
            return cast(Device, wanted)
        if not self._owns_zygote or likely_device(wanted) == "cuda":
            if self.environment.device == "cuda":
                return "cuda"
            if self._owns_zygote:
                self._fall_back_to_cpu(wanted)
        return "cpu"

    def _fall_back_to_cpu(self, wanted: str) -> None:
        self.close()
        if wanted == "cuda":
            raise ExecutorUnavailable(
                "device='cuda', but torch finds no usable GPU; check the driver and CUDA_VISIBLE_DEVICES, or use 'cpu'"
            )
        del self.environment
        self.zygote = self._start_zygote("cpu")
        self._executor = self._new_executor()

    def _request(self, declaration: Declaration, cases: Sequence[Case], **how: Any) -> JudgeRequest:
        """Raises `CaseTooLarge`."""
        for case in cases:
            check_size(case)
        encoded = [msgspec.Raw(encode_case(case)) for case in cases]
        target, watched = declaration.target, self._watching
        return JudgeRequest(target, encoded, self.oracles, self.tolerance, watched=watched, **how)

    def _ask(
        self, declaration: Declaration, request: JudgeRequest, timeout_s: float
    ) -> tuple[JudgeReply | Died | TimedOut, float]:
        """The reply, and the seconds that it waited for builds. Raises where nothing of the kind can be judged."""
        self.gpu_share = 0.0
        reply = self.kernels.call(declaration, "judge", request, JudgeReply, timeout_s=timeout_s)
        if not isinstance(reply, JudgeReply):
            return reply, 0.0
        if reply.problem is not None:
            raise ProblemUnusable(reply.problem)
        if reply.environment is not None:
            raise ExecutorUnavailable(reply.environment)
        self.gpu_share = reply.gpu_share
        return reply, self.kernels.built_s

    def _use_after(
        self, declaration: Declaration, case: msgspec.Raw, calls: int, timeout_s: float | None
    ) -> MemoryUse | None:
        request = GrowthRequest(declaration.target, case, calls)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        reply = self.kernels.call(declaration, "growth", request, GrowthReply, timeout_s=timeout_s)
        return reply.use if isinstance(reply, GrowthReply) else None


def _with_builds(verdict: Verdict, built_s: float) -> Verdict:
    """The verdict, of whose time so much was that of builds: they count as compiling.

    Triton starts an assembler for what it compiles, and tells how long that took in all.
    """
    timing = verdict.timing
    if (built_s := built_s - timing.compile_s) <= 0:
        return verdict
    return msgspec.structs.replace(
        verdict,
        timing=msgspec.structs.replace(
            timing,
            compile_s=timing.compile_s + built_s,
            kernel_s=max(0.0, timing.kernel_s - built_s),
            built_s=built_s,
        ),
    )
