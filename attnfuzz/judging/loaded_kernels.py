"""The kernels that an executor has imported, and whether the device that it runs them on still answers. Torch-free."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from attnfuzz.declaration import Absent, Declaration, KernelLoadError
from attnfuzz.isolation.builds import GiveUp, never
from attnfuzz.isolation.devices import Device
from attnfuzz.isolation.executor import Executor, was_killed_from_outside
from attnfuzz.isolation.outcomes import (
    Answered,
    DeadlinePassed,
    DeviceLost,
    Died,
    ExecutorUnavailable,
    Reply,
    ServiceError,
    TimedOut,
)
from attnfuzz.judging.executor_deaths import failure_of
from attnfuzz.judging.messages import (
    BuildReply,
    BuildRequest,
    BuiltReply,
    BuiltRequest,
    Contract,
    DeclarationsReply,
    DeclarationsRequest,
    DeviceReply,
    PrepareReply,
    PrepareRequest,
)

_PROBES = 2
_MOST_KILLED = 10
"""Calls that ended because something kills processes. An executor begins each of them three times."""


def why_no_answer(executor: Executor, device: Device, *, patience_s: float) -> str | None:
    """Why ``device`` does not answer within ``patience_s``; None if it does.

    A process that something killed says nothing about the device, so another one is asked. Raises
    `ExecutorUnavailable` if that goes on.
    """
    why, silent, killed = "", 0, 0
    while silent < _PROBES:
        outcome = executor.call("device", b"{}", timeout_s=patience_s)
        if isinstance(outcome, Reply):
            reply = outcome.read(DeviceReply)
            if reply is not None and reply.device == device:
                return None
            why = "torch does not find it"
        else:
            why = failure_of(outcome).message
            if was_killed_from_outside(outcome):
                killed += 1
                if killed == _MOST_KILLED:
                    raise ExecutorUnavailable(
                        f"something kills every process that starts to use the {device} device ({why}); look for what "
                        "does (out of memory?), or take fewer workers"
                    )
                continue
        silent += 1
    return why


LOAD_TIMEOUT_S = 300.0
_PROBE_TIMEOUT_S = 30.0
"""For a fresh process to get an answer from the GPU, which takes half a second."""
_PREPARE_TIMEOUT_S = 1800.0
START_TIMEOUT_S = 120.0
"""For starting a device, where a hundred do so at once."""


class LoadedKernels:
    """Has ``executor`` import a kernel before it is asked anything about it, in each process that it goes on in.

    A kernel is judged by what the declaration says that comes with the call, also where its file declares otherwise.
    ``prepared`` are the targets that need no preparing any more; what is prepared here is added.
    """

    def __init__(
        self,
        executor: Executor,
        device: Device,
        prepared: set[str] | None = None,
        *,
        import_patience_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        self._executor = executor
        self._device = device
        self._loaded: tuple[int | None, dict[str, Contract]] = (None, {})
        self._on_device: int | None = None
        self._stuck: str | None = None
        self.prepared = set() if prepared is None else prepared
        self.import_patience_s = min(import_patience_s, LOAD_TIMEOUT_S)
        """How long an import may do nothing; one that computes has ``LOAD_TIMEOUT_S``."""
        self.give_up: GiveUp = never
        """Which builds are not waited for; those of imports always are."""
        self.built_s = 0.0
        """How long the latest call that was answered has waited for builds."""

    @property
    def is_fresh(self) -> bool:
        """Whether the present process has not imported any kernel yet."""
        return self._executor.pid is not None and not self._contracts

    def declarations(self, targets: Sequence[str], *, within: Path | None = None) -> list[Declaration]:
        """Declarations of all kernels that `targets` name. Raises `KernelLoadError` in one sentence.

        `within`: see `load_kernels`. A target that has been let through once is loaded again without it.
        """
        return self._load(DeclarationsRequest(list(targets), None if within is None else str(within))).kernels

    def listed(self, targets: Sequence[str]) -> tuple[list[Declaration], list[Absent]]:
        """The declarations, and those kernels of engines that cannot be had here. Raises `KernelLoadError`."""
        reply = self._load(DeclarationsRequest(list(targets), absent=True))
        return reply.kernels, reply.absent

    def import_known(self, declarations: Sequence[Declaration]) -> None:
        """Have the present process import kernels that are known, all at once. Raises `KernelLoadError`."""
        self._load(DeclarationsRequest([one.target for one in declarations], known=True))

    def prepare(self, declaration: Declaration) -> None:
        """Have the kernel do what it declares to do before its first case.

        Raises `KernelLoadError` if it cannot, and `DeadlinePassed` if that was given up.
        """
        self.start_device()
        reply = self._call(
            "prepare", PrepareRequest(declaration.target), PrepareReply, _PREPARE_TIMEOUT_S, self.give_up
        )
        if isinstance(reply, TimedOut) and reply.cut_off:
            raise DeadlinePassed
        why = reply.raised if isinstance(reply, PrepareReply) else failure_of(reply).message
        if why is not None:
            raise KernelLoadError(f"prepare() of {declaration.target} failed: {why}")
        self.prepared.add(declaration.target)

    def begin_builds(self, request: BuildRequest) -> BuildReply | None:
        """Have the present process begin to build; None if it does not say what. Raises `ExecutorUnavailable`."""
        self.start_device()
        reply = self._call("build", request, BuildReply, _PREPARE_TIMEOUT_S, self.give_up)
        return reply if isinstance(reply, BuildReply) else None

    def built(self) -> BuiltReply | None:
        """How far the present process has come with it; None if it does not say."""
        reply = self._call("built", BuiltRequest(), BuiltReply, _PROBE_TIMEOUT_S, self.give_up)
        return reply if isinstance(reply, BuiltReply) else None

    def start_device(self) -> None:
        """Have the present process start CUDA if it is to use it, with more patience than for a case.

        Raises `DeviceLost` if the GPU does not answer, and `ExecutorUnavailable`.
        """
        if self._device == "cuda" and (self._executor.pid is None or self._executor.pid != self._on_device):
            # processes that start at once initialise CUDA one after the other
            self._check_device("the start of an executor", patience_s=START_TIMEOUT_S)
            self._on_device = self._executor.pid

    def call(
        self, declaration: Declaration, method: str, request: msgspec.Struct, reply: type[Answered], *, timeout_s: float
    ) -> Answered | Died | TimedOut:
        """Make one call that is about a kernel; importing it does not count against `timeout_s`.

        An answer that is no `reply` counts as the death of the process: the kernel has overwritten what is not its own.

        Raises `KernelLoadError`, `ExecutorUnavailable` where there is no device to go on with afterwards,
        `DeadlinePassed` where that came in a build, and `ServiceError` for a bug of the framework, after which calls
        have a fresh process.
        """
        self._ensure_loaded(declaration)
        outcome = self._call(method, request, reply, timeout_s, self.give_up)
        if isinstance(outcome, TimedOut):
            if outcome.cut_off and not outcome.still_alive:
                raise DeadlinePassed
            self._look_at_device(declaration, outcome)
        return outcome

    def _call(
        self,
        method: str,
        request: msgspec.Struct,
        reply: type[Answered],
        timeout_s: float,
        give_up: GiveUp = never,
        longest_s: float | None = None,
    ) -> Answered | Died | TimedOut:
        payload = msgspec.json.encode(request)
        try:
            outcome = self._executor.call(method, payload, timeout_s=timeout_s, give_up=give_up, longest_s=longest_s)
        except ServiceError:  # what kernels have written into this process may be behind it
            self._executor.restart()
            raise
        if not isinstance(outcome, Reply):
            return outcome
        self.built_s = outcome.built_s
        answer = outcome.read(reply)
        return self._executor.distrust() if answer is None else answer

    def _ensure_loaded(self, declaration: Declaration) -> None:
        """Have the present process start CUDA and import the kernel, with more patience than for a case."""
        if not declaration.target:
            raise KernelLoadError(
                f"kernel {declaration.name!r} is not at the top level of a file, so no other process can import it; "
                "move it there, or check it with isolated=False"
            )
        if self._stuck:
            raise self._stuck_error()
        self.start_device()
        if self._contracts.get(declaration.target) != (contract := _contract(declaration)):
            self._load(DeclarationsRequest([declaration.target], contract=contract, known=True))
            self._contracts[declaration.target] = contract
        if declaration.needs_preparing and declaration.target not in self.prepared:
            self.prepare(declaration)

    def _load(self, request: DeclarationsRequest) -> DeclarationsReply:
        """See `declarations`. A process may die of what a kernel did to it before; then a fresh one is asked."""
        had_kernels = bool(self._contracts)
        reply = self._import(request)
        if isinstance(reply, Died) and had_kernels:
            self.start_device()
            reply = self._import(request)
        if isinstance(reply, TimedOut):
            raise KernelLoadError(
                f"importing {', '.join(request.targets)} does not end: {failure_of(reply).message}; repair what it "
                "waits for, or give it more time with a larger --budget"
            )
        if not isinstance(reply, DeclarationsReply):
            raise KernelLoadError(f"importing {', '.join(request.targets)} failed: {failure_of(reply).message}")
        if reply.error is not None:
            raise KernelLoadError(reply.error)
        self._contracts.update((declaration.target, _contract(declaration)) for declaration in reply.kernels)
        return reply

    def _import(self, request: DeclarationsRequest) -> DeclarationsReply | Died | TimedOut:
        return self._call("declarations", request, DeclarationsReply, self.import_patience_s, longest_s=LOAD_TIMEOUT_S)

    @property
    def _contracts(self) -> dict[str, Contract]:
        """Contracts of the kernels that the present process has imported: it judges them by these."""
        if self._loaded[0] is None or self._loaded[0] != self._executor.pid:
            self._loaded = self._executor.pid, {}
        return self._loaded[1]

    def _look_at_device(self, declaration: Declaration, hang: TimedOut) -> None:
        """After a hang, find out whether there is still a device to go on with."""
        after = f"a hang of {declaration.target}"
        if hang.still_alive:
            self._stuck = f"{after} left a process on {self._device} that could not be killed"
            if self._device == "cuda":
                raise self._stuck_error()
        elif self._device == "cuda":
            self._check_device(after, patience_s=_PROBE_TIMEOUT_S)

    def _check_device(self, after: str, *, patience_s: float) -> None:
        """Raise `DeviceLost` unless the GPU still answers a fresh process: else every case from now on would hang."""
        if why := why_no_answer(self._executor, self._device, patience_s=patience_s):
            raise DeviceLost(
                f"the GPU does not answer any more after {after} ({why}); reset it, or leave it out with "
                "CUDA_VISIBLE_DEVICES"
            )

    def _stuck_error(self) -> ExecutorUnavailable:
        text = f"{self._stuck}, so the device is in an unknown state; wait for the process to end, or reset the device"
        return DeviceLost(text) if self._device == "cuda" else ExecutorUnavailable(text)


def _contract(declaration: Declaration) -> Contract:
    return Contract(declaration.supports, declaration.numerics)
