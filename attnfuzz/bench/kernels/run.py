"""Runs a plan: each contender in turn on each shape, until the budget is spent. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Protocol

from msgspec.structs import replace

from attnfuzz.bench.kernels.laboratory import Crashed
from attnfuzz.bench.kernels.messages import MachineReply, MeasureReply, MeasureRequest, Timed
from attnfuzz.bench.kernels.plan import Entry, KernelBench, Options, entries
from attnfuzz.bench.kernels.results import STATES, Report, Result
from attnfuzz.bench.kernels.shapes import Shape, bytes_to_move
from attnfuzz.declaration import Declaration

__all__ = ["PEAK_COPY_BYTES", "Measures", "measure_kernels", "versions_text"]

PEAK_COPY_BYTES = (1 << 30, 3 << 29)
"""Of copies that are long enough to tell the bandwidth; the fastest counts."""

_SMALL_COPY_BYTES = (16 << 20,)
"""Where there is no GPU."""


class Measures(Protocol):
    """What is needed of a ``Laboratory``."""

    machine: MachineReply

    def copy(self, nbytes: int, seconds: float) -> Timed: ...

    def measure(self, request: MeasureRequest) -> MeasureReply: ...


def measure_kernels(
    bench: KernelBench,
    laboratory: Measures,
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
        machine=laboratory.machine,
        peak_gb_s=_peak_gb_s(laboratory, bench.seconds),
        suites=tuple(bench.suites),
        references={one.target: versions_text(one) for one in references},
        results=[],
    )
    run = _Run(bench, laboratory)
    for entry in entries(bench, kernels, references):
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


def _peak_gb_s(laboratory: Measures, seconds: float) -> float:
    sizes = PEAK_COPY_BYTES if laboratory.machine.device == "cuda" else _SMALL_COPY_BYTES
    return max(nbytes / laboratory.copy(nbytes, seconds).median_us * 1e-3 for nbytes in sizes)


class _Run:
    """Remembers what was measured, by contender and shape, and the time of copies by their size."""

    def __init__(self, bench: KernelBench, laboratory: Measures) -> None:
        self._bench = bench
        self._laboratory = laboratory
        self._known: dict[tuple[str, Shape], list[tuple[Options, MeasureReply | Crashed]]] = {}
        self._copies: dict[int, float] = {}

    def knows(self, entry: Entry) -> bool:
        return _key(entry) in self._known

    def results(self, entry: Entry) -> list[Result]:
        if not self.knows(entry):
            nbytes = bytes_to_move(entry.shape)
            if nbytes not in self._copies:  # before the tensors of the shape take the memory
                self._copies[nbytes] = self._laboratory.copy(nbytes, self._bench.seconds).median_us
            self._known[_key(entry)] = [(choice, self._reply(entry, choice)) for choice in entry.choices]
        found = [self._result(entry, *one) for one in self._known[_key(entry)]]
        best = min(range(len(found)), key=lambda i: _rank(found[i]))
        return [replace(result, chosen=i == best) for i, result in enumerate(found)]

    def _reply(self, entry: Entry, choice: Options) -> MeasureReply | Crashed:
        request = MeasureRequest(
            contender=entry.contender,
            shape=entry.timed_on,
            options=choice,
            l2=self._bench.l2,
            modes=self._bench.modes,
            seconds=self._bench.seconds,
        )
        try:
            return self._laboratory.measure(request)
        except Crashed as how:
            return how

    def _result(self, entry: Entry, choice: Options, reply: MeasureReply | Crashed) -> Result:
        nbytes = bytes_to_move(entry.shape)
        result = Result(
            suite=entry.suite,
            shape=entry.shape,
            contender=entry.contender,
            is_reference=entry.is_reference,
            status="crashed",
            nbytes=nbytes,
            options=choice,
            copy_us=self._copies.get(nbytes),
        )
        if isinstance(reply, Crashed):
            return replace(result, note=str(reply))
        return replace(result, status=reply.status, times=reply.times, error_ratio=reply.error_ratio, note=reply.note)


def _key(entry: Entry) -> tuple[str, Shape]:
    return entry.contender, replace(entry.timed_on, label="")


def _rank(result: Result) -> tuple[int, float]:
    """Right ones first, by the time in a graph from memory, or the nearest to that there is."""
    medians = [timed.median_us for state in STATES if (timed := result.time(*state)) is not None]
    failed = {"ok": 0, "wrong": 1, "crashed": 2, "failed": 3, "unmeasured": 4, "unsupported": 5}[result.status]
    return failed, medians[0] if medians else float("inf")
