"""The driver of ``attnfuzz bench kernels``: what is timed, by which process, until the budget is spent. Torch-free."""

from __future__ import annotations

import fnmatch
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol, Self, TypeVar

import msgspec
from msgspec.structs import replace

from attnfuzz.bench.kernels.shapes import (
    PROBLEMS_OF,
    STATES,
    SUITES,
    CopyReply,
    CopyRequest,
    L2State,
    MachineReply,
    MeasureReply,
    MeasureRequest,
    Mode,
    Report,
    Result,
    Shape,
    Timed,
    bytes_to_move,
)
from attnfuzz.campaign.workers import cores
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.isolation.devices import likely_device
from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.outcomes import ExecutorUnavailable, Reply
from attnfuzz.isolation.zygote_client import Zygote
from attnfuzz.judging.executor_deaths import failure_of
from attnfuzz.judging.messages import DeclarationsReply, DeclarationsRequest
from attnfuzz.problems.supports import OptionValue

_PEAK_COPY_BYTES = (1 << 30, 3 << 29)
"""Sizes of copies that are long enough to tell the bandwidth; the fastest counts."""

_SMALL_COPY_BYTES = (16 << 20,)
"""Where there is no GPU."""


class Measures(Protocol):
    """The methods of a ``TimingProcess`` that are needed."""

    machine: MachineReply

    def copy(self, nbytes: int, seconds: float) -> Timed: ...

    def measure(self, request: MeasureRequest) -> MeasureReply: ...

    def compile_ahead(self, requests: Sequence[MeasureRequest], seconds: float) -> None: ...


def measure_kernels(
    bench: KernelBench,
    process: Measures,
    kernels: Sequence[Declaration],
    references: Sequence[Declaration],
    report_row: Callable[[Result], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Measure ``kernels`` and, beside them, ``references``.

    ``report_row`` gets the chosen result of each contender and shape as it is known.
    """
    started = clock()
    report = Report(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=process.machine,
        peak_gb_s=_peak_gb_s(process, bench.seconds),
        suites=tuple(bench.suites),
        references={one.target: versions_text(one) for one in references},
        results=[],
    )
    run = _Run(process, bench.seconds)
    entries = list(_entries(bench, kernels, references))
    if process.machine.device == "cuda":  # several processes compile what one would compile in turn between times
        asked = {_key(one): one for entry in entries for one in entry.requests(bench.seconds)}
        process.compile_ahead([*asked.values()], bench.budget_s / 3)
    for entry in entries:
        if clock() - started > bench.budget_s and not run.knows(entry):
            report.unreached += 1
            continue
        found = run.results(entry)
        report.results += found
        report_row(next(result for result in found if result.chosen))
    report.elapsed_s = clock() - started
    return report


def versions_text(declaration: Declaration) -> str:
    """ "vllm 0.33.0"."""
    return ", ".join(f"{package} {version}" for package, version in declaration.versions.items())


def _peak_gb_s(process: Measures, seconds: float) -> float:
    sizes = _PEAK_COPY_BYTES if process.machine.device == "cuda" else _SMALL_COPY_BYTES
    return max(nbytes / process.copy(nbytes, seconds).median_us * 1e-3 for nbytes in sizes)


class _Run:
    """Remembers what was measured, by contender, options and shape, and the time of copies by their size."""

    def __init__(self, process: Measures, seconds: float) -> None:
        self._process = process
        self._seconds = seconds
        self._known: dict[str, MeasureReply | Crashed] = {}
        self._copies: dict[int, float] = {}

    def knows(self, entry: _Entry) -> bool:
        return all(_key(request) in self._known for request in entry.requests(self._seconds))

    def results(self, entry: _Entry) -> list[Result]:
        nbytes = bytes_to_move(entry.shape)
        if nbytes not in self._copies:  # before the tensors of the shape take the memory
            self._copies[nbytes] = self._process.copy(nbytes, self._seconds).median_us
        found = [self._result(entry, request) for request in entry.requests(self._seconds)]
        best = min(range(len(found)), key=lambda i: _rank(found[i]))
        return [replace(result, chosen=i == best) for i, result in enumerate(found)]

    def _reply(self, request: MeasureRequest) -> MeasureReply | Crashed:
        if (key := _key(request)) not in self._known:
            try:
                self._known[key] = self._process.measure(request)
            except Crashed as how:
                self._known[key] = how
        return self._known[key]

    def _result(self, entry: _Entry, request: MeasureRequest) -> Result:
        reply = self._reply(request)
        nbytes = bytes_to_move(entry.shape)
        result = Result(
            suite=entry.suite,
            shape=entry.shape,
            contender=entry.contender,
            is_reference=entry.is_reference,
            status="crashed",
            nbytes=nbytes,
            options=request.options,
            copy_us=self._copies.get(nbytes),
        )
        if isinstance(reply, Crashed):
            return replace(result, note=str(reply))
        return replace(result, status=reply.status, times=reply.times, error_ratio=reply.error_ratio, note=reply.note)


def _key(request: MeasureRequest) -> str:
    """A key that shapes share which differ in nothing but their labels."""
    return repr(replace(request, shape=replace(request.shape, label="")))


def _rank(result: Result) -> tuple[int, float]:
    """Right ones first, by the time in a graph from memory, or the nearest to that there is."""
    medians = [timed.median_us for state in STATES if (timed := result.time(*state)) is not None]
    failed = {"ok": 0, "wrong": 1, "crashed": 2, "failed": 3, "unmeasured": 4, "unsupported": 5}[result.status]
    return failed, medians[0] if medians else float("inf")


_DEFAULT_PAGES = 16

Options = dict[str, OptionValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBench:
    """``suites``: shapes by name. ``options``: the values to try in place of the first that a kernel declares, or all
    that an engine's has.

    ``seconds``: of one measurement. ``budget_s``: after which none is begun.
    """

    suites: Mapping[str, Sequence[Shape]]
    options: Mapping[str, tuple[OptionValue, ...]]
    l2: tuple[L2State, ...] = ("cold", "warm")
    modes: tuple[Mode, ...] = ("eager", "graph")
    seconds: float = 0.05
    budget_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One contender on one shape: all ``choices`` of its options are timed. ``timed_on``: the shape that stands for it.

    Those that do not see pages are timed once for all page sizes.
    """

    suite: str
    shape: Shape
    timed_on: Shape
    contender: str
    is_reference: bool
    choices: tuple[Options, ...]
    l2: tuple[L2State, ...] = ("cold", "warm")
    modes: tuple[Mode, ...] = ("eager", "graph")

    def requests(self, seconds: float) -> list[MeasureRequest]:
        """One for each of the choices."""
        return [
            MeasureRequest(
                contender=self.contender,
                shape=self.timed_on,
                options=choice,
                l2=self.l2,
                modes=self.modes,
                seconds=seconds,
            )
            for choice in self.choices
        ]


def _entries(bench: KernelBench, kernels: Sequence[Declaration], references: Sequence[Declaration]) -> Iterator[_Entry]:
    """Shape after shape, so that tensors are drawn once. All choices of the options of ``references`` are tried."""
    named = {kernel.target for kernel in kernels}
    contenders = [*kernels, *(one for one in references if one.target not in named)]
    for suite, shapes in bench.suites.items():
        for shape in shapes:
            for number, kernel in enumerate(contenders):
                if str(kernel.problem) in PROBLEMS_OF[shape.kind]:
                    is_reference = number >= len(kernels)
                    choices = _choices_of(kernel.options, bench.options, try_all=is_reference or bool(kernel.versions))
                    yield _Entry(
                        suite,
                        shape,
                        _timed_on(shape, kernel),
                        kernel.target,
                        is_reference,
                        choices,
                        l2=bench.l2,
                        modes=bench.modes,
                    )


def _timed_on(shape: Shape, kernel: Declaration) -> Shape:
    """The shape that stands for it: pages are all one to a kernel that sees none."""
    return shape.in_pages_of(_DEFAULT_PAGES) if kernel.problem == "dense_decode" else shape


def _choices_of(
    declared: Mapping[str, tuple[OptionValue, ...]],
    asked: Mapping[str, tuple[OptionValue, ...]],
    *,
    try_all: bool = False,
) -> tuple[Options, ...]:
    """All combinations of what is ``asked`` for; for the rest the first that is ``declared``, or all."""
    values = [asked.get(name, choices if try_all else choices[:1]) for name, choices in declared.items()]
    return tuple(dict(zip(declared, chosen, strict=True)) for chosen in itertools.product(*values))


def choose_kernels(declarations: Sequence[Declaration], *, named: bool) -> list[Declaration]:
    """The kernels with a problem that is timed; if the user ``named`` none, only what can be captured into a CUDA
    graph.

    Raises KernelLoadError if none is left.
    """
    timed = {problem for problems in PROBLEMS_OF.values() for problem in problems}
    chosen = [one for one in declarations if str(one.problem) in timed and (named or one.supports.graph_replay)]
    if not chosen:
        names = ", ".join(one.target for one in declarations)
        raise KernelLoadError(f"of {names} none can be timed; name kernels of {', '.join(sorted(timed))}")
    return chosen


def choose_shapes(suites: Sequence[str], patterns: Sequence[str]) -> dict[str, list[Shape]]:
    """The shapes of ``suites`` whose label fits one of ``patterns``, or all. Raises KernelLoadError if none does."""
    found = {name: SUITES[name]() for name in suites}
    if not patterns:
        return found
    labels = [shape.label for shapes in found.values() for shape in shapes]
    kept = {
        name: [shape for shape in shapes if any(fnmatch.fnmatchcase(shape.label, one) for one in patterns)]
        for name, shapes in found.items()
    }
    if not any(kept.values()):
        raise KernelLoadError(f"--shape {' '.join(patterns)}: no shape has such a label; there are {', '.join(labels)}")
    return {name: shapes for name, shapes in kept.items() if shapes}


SERVICE = "attnfuzz.bench.kernels.service:TimingService"
_START_TIMEOUT_S = 300.0
_MEASURE_TIMEOUT_S = 300.0
"""Compiling FlexAttention for a new shape takes half a minute."""

_MOST_PROCESSES = 12
"""That compile. They share a GPU, whose driver begins one process after another."""

_ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Its pool of compiler processes does not come to life in a forked process."""

Message = TypeVar("Message", bound=msgspec.Struct)


class Crashed(Exception):  # noqa: N818 - says what happened to the process
    """The process died of a measurement, or did not answer in time; the message says how."""


class TimingProcess:
    """Measures on one device. A context manager; raises ExecutorUnavailable.

    ``beside``: another that goes on for longer, which has started what both are forked from.
    """

    def __init__(self, device: str = "auto", *, beside: TimingProcess | None = None) -> None:
        self._is_beside = beside is not None
        self._zygote: Zygote = (
            Zygote.start(likely_device(device), service=SERVICE) if beside is None else beside._zygote
        )  # fmt: skip
        try:
            self._executor = Executor(self._zygote, environment=_ENVIRONMENT)
            self.machine = self._must("machine", None, MachineReply)
            if device == "cuda" and self.machine.device != "cuda":
                raise ExecutorUnavailable("torch finds no GPU here; leave out --device cuda, or repair the driver")
        except BaseException:
            if not self._is_beside:
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

    def compile_ahead(self, requests: Sequence[MeasureRequest], seconds: float) -> None:
        """Have each called once, in several processes at a time: what Triton compiles is in its cache from then on.

        None is begun after so many ``seconds``, and no result is looked at: ``measure`` finds what is wrong, or dies.
        """
        until = time.monotonic() + seconds
        untimed = iter([replace(one, l2=("warm",), modes=()) for one in requests])

        def work() -> None:
            with suppress(ExecutorUnavailable), TimingProcess(beside=self) as mine:  # fewer compile, or none does
                while time.monotonic() < until and (request := next(untimed, None)) is not None:
                    with suppress(Crashed):  # it will crash again when it is measured, and be told then
                        mine.measure(request)

        workers = max(1, min(len(requests), cores() - 2, _MOST_PROCESSES))
        with ThreadPoolExecutor(workers) as pool:
            try:
                for done in [pool.submit(work) for _ in range(workers)]:
                    done.result()
            except BaseException:
                until = 0.0
                raise

    def close(self) -> None:
        """End the process."""
        self._executor.close()
        if not self._is_beside:
            self._zygote.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
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
