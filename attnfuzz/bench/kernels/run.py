"""The driver of ``attnfuzz bench kernels``: what is timed, by which process, until the budget is spent. Torch-free."""

from __future__ import annotations

import fnmatch
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar, get_args

import msgspec
from msgspec.structs import replace

from attnfuzz.bench.kernels.shapes import (
    PROBLEMS_OF,
    STATES,
    SUITES,
    CopyRequest,
    L2State,
    MachineReply,
    MeasureReply,
    MeasureRequest,
    Mode,
    Report,
    Result,
    RowStatus,
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
from attnfuzz.judging.messages import DeclarationsReply, DeclarationsRequest, DeviceRequest
from attnfuzz.problems.supports import OptionValue

_PEAK_COPY_BYTES = {"cuda": (1 << 30, 3 << 29), "cpu": (16 << 20,)}
"""Sizes of copies that are long enough to tell the bandwidth; the fastest counts."""


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


def measure_kernels(
    bench: KernelBench,
    process: TimingProcess,
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
        peak_gb_s=max(
            nbytes / process.copy(nbytes, bench.seconds).median_us * 1e-3
            for nbytes in _PEAK_COPY_BYTES[process.machine.device]
        ),
        suites=tuple(bench.suites),
        references={one.target: versions_text(one) for one in references},
        results=[],
    )
    entries = list(_entries(bench, kernels, references))
    if process.machine.device == "cuda":  # several processes compile what one would compile in turn between times
        asked = {repr(request): request for entry in entries for _, request in entry}
        process.compile_ahead([*asked.values()], bench.budget_s / 3)
    known: dict[str, dict[str, Any]] = {}
    copies: dict[int, float] = {}
    for entry in entries:
        if clock() - started > bench.budget_s and not all(repr(request) in known for _, request in entry):
            report.unreached += 1
            continue
        found = []
        for row, request in entry:
            if row.nbytes not in copies:  # before the tensors of the shape take the memory
                copies[row.nbytes] = process.copy(row.nbytes, bench.seconds).median_us
            if (key := repr(request)) not in known:
                known[key] = _measured(process, request)
            found.append(replace(row, **known[key], copy_us=copies[row.nbytes]))
        best = min(found, key=_rank)
        found = [replace(one, chosen=one is best) for one in found]
        report.results += found
        report_row(next(one for one in found if one.chosen))
    report.elapsed_s = clock() - started
    return report


def _measured(process: TimingProcess, request: MeasureRequest) -> dict[str, Any]:
    """The fields of a `Result` that a measurement tells."""
    try:
        return msgspec.structs.asdict(process.measure(request))
    except Crashed as how:
        return {"status": "crashed", "note": str(how)}


def versions_text(declaration: Declaration) -> str:
    """ "vllm 0.33.0"."""
    return ", ".join(f"{package} {version}" for package, version in declaration.versions.items())


def _rank(result: Result) -> tuple[int, float]:
    """Right ones first, by the time in a graph from memory, or the nearest to that there is."""
    medians = [timed.median_us for state in STATES if (timed := result.time(*state)) is not None]
    return get_args(RowStatus).index(result.status), medians[0] if medians else float("inf")


def _entries(
    bench: KernelBench, kernels: Sequence[Declaration], references: Sequence[Declaration]
) -> Iterator[list[tuple[Result, MeasureRequest]]]:
    """Rows of the report, still without times, and the request for each: a list for each contender and shape.

    Shapes that make no difference to a contender are one request: their labels, and of dense keys and values the pages.
    All choices of the options of ``references`` are tried, of others the first.
    """
    named = {kernel.target for kernel in kernels}
    contenders = [*kernels, *(one for one in references if one.target not in named)]
    for suite, shapes in bench.suites.items():
        for shape, (number, kernel) in itertools.product(shapes, enumerate(contenders)):
            if str(kernel.problem) not in PROBLEMS_OF[shape.kind]:
                continue
            is_reference = number >= len(kernels)
            pages = 16 if kernel.problem == "dense_decode" else shape.block_size
            timed_on = replace(shape, label="", block_size=pages)
            yield [
                (
                    Result(
                        suite=suite,
                        shape=shape,
                        contender=kernel.target,
                        is_reference=is_reference,
                        status="unmeasured",
                        nbytes=bytes_to_move(shape),
                        options=choice,
                    ),
                    MeasureRequest(
                        contender=kernel.target,
                        shape=timed_on,
                        options=choice,
                        l2=bench.l2,
                        modes=bench.modes,
                        seconds=bench.seconds,
                    ),
                )
                for choice in _choices_of(kernel.options, bench.options, is_reference or bool(kernel.versions))
            ]


def _choices_of(
    declared: Mapping[str, tuple[OptionValue, ...]], asked: Mapping[str, tuple[OptionValue, ...]], try_all: bool
) -> list[dict[str, OptionValue]]:
    """All combinations of what is ``asked`` for; for the rest the first that is ``declared``, or all."""
    values = [asked.get(name, choices if try_all else choices[:1]) for name, choices in declared.items()]
    return [dict(zip(declared, chosen, strict=True)) for chosen in itertools.product(*values)]


def choose_kernels(declarations: Sequence[Declaration], *, named: bool) -> list[Declaration]:
    """The kernels with a problem that is timed; if the user ``named`` none, only what can be captured into a CUDA
    graph.

    Raises KernelLoadError if none is left.
    """
    timed = {*itertools.chain(*PROBLEMS_OF.values())}
    chosen = [one for one in declarations if str(one.problem) in timed and (named or one.supports.graph_replay)]
    if not chosen:
        names = ", ".join(one.target for one in declarations)
        raise KernelLoadError(f"of {names} none can be timed; name kernels of {', '.join(sorted(timed))}")
    return chosen


def choose_shapes(suites: Sequence[str], patterns: Sequence[str]) -> dict[str, list[Shape]]:
    """The shapes of ``suites`` whose label fits one of ``patterns``, or all. Raises KernelLoadError if none does."""
    known = {name: SUITES[name]() for name in suites}
    kept = {
        name: [shape for shape in shapes if any(fnmatch.fnmatchcase(shape.label, one) for one in patterns or ("*",))]
        for name, shapes in known.items()
    }
    if not any(kept.values()):
        labels = ", ".join(shape.label for shapes in known.values() for shape in shapes)
        raise KernelLoadError(f"--shape {' '.join(patterns)}: no shape has such a label; there are {labels}")
    return {name: shapes for name, shapes in kept.items() if shapes}


SERVICE = "attnfuzz.bench.kernels.service:TimingService"
_TIMEOUT_S = 300.0
"""Compiling FlexAttention for a new shape takes half a minute."""

_MOST_PROCESSES = 12
"""That compile. They share a GPU, whose driver begins one process after another."""

_ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Its pool of compiler processes does not come to life in a forked process."""

Message = TypeVar("Message", bound=msgspec.Struct)


class Crashed(Exception):  # noqa: N818 - says what happened to the process
    """The process died of a measurement, or did not answer in time; the message says how."""


class TimingProcess(ExitStack):
    """Measures on one device. A context manager; raises ExecutorUnavailable.

    ``beside``: another that goes on for longer, which has started what both are forked from.
    """

    def __init__(self, device: str = "auto", *, beside: TimingProcess | None = None) -> None:
        super().__init__()
        try:
            self._zygote: Zygote = (
                beside._zygote if beside else self.enter_context(Zygote.start(likely_device(device), service=SERVICE))
            )
            self._executor = Executor(self._zygote, environment=_ENVIRONMENT)
            self.callback(self._executor.close)
            self.machine = self._must("machine", DeviceRequest(), MachineReply)
            if device == "cuda" and self.machine.device != "cuda":
                raise ExecutorUnavailable("torch finds no GPU here; leave out --device cuda, or repair the driver")
        except BaseException:
            self.close()
            raise

    def declarations(self, targets: Sequence[str]) -> list[Declaration]:
        """The kernels that ``targets`` name, each once. Raises KernelLoadError."""
        try:
            reply = self._ask("declarations", DeclarationsRequest(list(targets)), DeclarationsReply)
        except Crashed as how:
            raise KernelLoadError(f"importing {', '.join(targets)} failed: {how}") from how
        if reply.error is not None:
            raise KernelLoadError(reply.error)
        return list({declaration.target: declaration for declaration in reply.kernels}.values())

    def copy(self, nbytes: int, seconds: float) -> Timed:
        """The time of a copy that moves so many bytes."""
        return self._must("copy", CopyRequest(nbytes, seconds), Timed)

    def measure(self, request: MeasureRequest) -> MeasureReply:
        """Raises Crashed."""
        return self._ask("measure", request, MeasureReply)

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

    def _must(self, method: str, request: msgspec.Struct, reply: type[Message]) -> Message:
        try:
            return self._ask(method, request, reply)
        except Crashed as how:
            raise ExecutorUnavailable(f"the device could not be used: {how}") from how

    def _ask(self, method: str, request: msgspec.Struct, reply: type[Message]) -> Message:
        outcome = self._executor.call(method, msgspec.json.encode(request), timeout_s=_TIMEOUT_S)
        if not isinstance(outcome, Reply):
            raise Crashed(failure_of(outcome).message)
        return msgspec.json.decode(outcome.body, type=reply)
