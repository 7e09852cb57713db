"""The coordinator: starts the workers, listens to them, keeps the budget and the findings."""

from __future__ import annotations

import selectors
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from attnfuzz.campaign.channel import ChannelClosed
from attnfuzz.campaign.finding_book import FindingBook
from attnfuzz.campaign.interrupts import Interrupts
from attnfuzz.campaign.messages import (
    Busy,
    Confirmed,
    Duplicate,
    Found,
    FromWorker,
    Known,
    Minimised,
    Progress,
    Setup,
    Smaller,
    Trouble,
    Unconfirmed,
)
from attnfuzz.campaign.reporter import Reporter
from attnfuzz.campaign.result import CampaignResult, Statistics, StopReason
from attnfuzz.campaign.saving import SaveFolder
from attnfuzz.campaign.signature import Symptom
from attnfuzz.campaign.worker_process import Launch, WorkerHandle
from attnfuzz.oracles.verdict import OracleName
from attnfuzz.problems.tolerance import Tolerance

__all__ = ["Coordinator", "Plan"]

_TICK_S = 0.25
_WAIT_FOR_WORKERS_S = 3.0
_MAX_RESTARTS_PER_WORKER = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What to search and for how long; the kernels and times are in ``statistics``."""

    statistics: Statistics
    oracles: tuple[OracleName, ...]
    save_folder: Path
    journal_folder: Path | None = None
    fail_fast: bool = False
    timeout_s: float | None = None
    tolerance: Tolerance = "bound"


class Coordinator:
    """One campaign. ``launch`` starts a worker."""

    def __init__(self, plan: Plan, *, launch: Launch, reporter: Reporter) -> None:
        self._plan = plan
        self._statistics = plan.statistics
        self._launch = launch
        self._reporter = reporter
        folder = SaveFolder(plan.save_folder, device=self._statistics.device_name, warn=reporter.note)
        kernels = {target: kernel.declaration for target, kernel in self._statistics.kernels.items()}
        self._book = FindingBook(kernels, started=self._statistics.started, folder=folder, reporter=reporter)
        self._statistics.findings = self._book.findings
        self._known: list[Known] = []
        self._busy: dict[str, tuple[Symptom, int]] = {}
        self._workers: dict[int, WorkerHandle] = {}
        self._restarts: dict[int, int] = {}
        self._troubles: list[str] = []
        self._in_trouble: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._fail_fast_hit = False
        self._environment_fails = False
        self._stopping = False

    def run(self) -> CampaignResult:
        """Search until the budget is spent, or another reason to stop comes first."""
        self._reporter.started(self._statistics)
        try:
            with Interrupts() as interrupts:
                for number in range(self._statistics.workers):
                    self._start(number)
                while (reason := self._reason_to_stop(interrupts)) is None:
                    self._listen(_TICK_S)
                self._finish(interrupts)
        finally:
            self._reporter.finished()
        return CampaignResult(
            stop_reason=reason,
            elapsed_s=self._statistics.elapsed_s(),
            statistics=self._statistics,
            findings=tuple(sorted(self._book.findings, key=lambda one: (one.shrunk_s is None, one.first_seen_s))),
            unconfirmed=tuple(self._book.unconfirmed),
            troubles=tuple(self._troubles),
        )

    def _reason_to_stop(self, interrupts: Interrupts) -> StopReason | None:
        if interrupts.count:
            return "interrupted"
        if self._fail_fast_hit:
            return "fail_fast"
        if self._environment_fails:
            return "environment"
        if self._statistics.remaining_s() <= 0:
            return "budget"
        return None if self._workers else "workers_lost"

    def _finish(self, interrupts: Interrupts) -> None:
        """Have the workers end, wait a little for what they still have to say, then end them."""
        self._stopping = True
        for worker in self._workers.values():
            worker.stop()
        patience = time.monotonic() + _WAIT_FOR_WORKERS_S
        while self._workers and time.monotonic() < patience and interrupts.count < 2:
            self._listen(0.05)
        for number in list(self._workers):
            self._lose(number)
        self._selector.close()

    def _start(self, number: int) -> None:
        worker = self._launch(self._setup(number))
        for message in (*self._known, *(_busy(symptom, True) for symptom, _ in self._busy.values())):
            worker.channel.send(message)
        self._workers[number] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, (number, "channel"))
        if worker.broker is not None:
            self._selector.register(worker.broker, selectors.EVENT_READ, (number, "broker"))

    def _setup(self, number: int) -> Setup:
        plan, statistics = self._plan, self._statistics
        return Setup(
            worker=number,
            num_workers=statistics.workers,
            seed=statistics.seed + (self._restarts.get(number, 0) << 32),
            kernels=tuple(kernel.declaration for kernel in statistics.kernels.values()),
            deadline=statistics.deadline,
            device=statistics.device,
            oracles=plan.oracles,
            journal=str(plan.journal_folder / f"worker-{number}.json") if plan.journal_folder else "",
            timeout_s=plan.timeout_s,
            tolerance=plan.tolerance,
        )

    def _listen(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            number, what = key.data
            if number not in self._workers:  # lost earlier in this very loop
                continue
            if what == "broker":
                self._lend(number)
            else:
                self._hear(number)
        self._reporter.progress(self._statistics)

    def _lend(self, number: int) -> None:
        worker = self._workers[number]
        if worker.broker is not None and not worker.lend():
            self._selector.unregister(worker.broker)

    def _hear(self, number: int) -> None:
        try:
            messages = self._workers[number].channel.receive()
        except ChannelClosed:
            self._worker_ended(number)
            return
        for message in messages:
            self._handle(number, message)

    def _handle(self, number: int, message: FromWorker) -> None:
        match message:
            case Progress():
                self._statistics.kernels[message.kernel].add(message)
            case Found():
                self._set_busy(number, message.finding, self._book.found(message).symptom)
            case Confirmed():
                self._book.confirmed(message)
            case Unconfirmed():
                self._book.unconfirmed_by(message)
                self._clear_busy(message.finding)
            case Smaller():
                self._book.smaller(message)
            case Minimised():
                symptom = self._book.minimised(message)
                self._announce(message, symptom.kernel)
                self._fail_fast_hit |= self._plan.fail_fast
            case Duplicate():
                self._announce(message, self._book.duplicate(message).kernel)
            case Trouble():
                self._in_trouble.add(number)
                self._note_trouble(message)

    def _note_trouble(self, trouble: Trouble) -> None:
        self._environment_fails |= trouble.environment
        if trouble.message not in self._troubles:
            self._troubles.append(trouble.message)
            self._reporter.note(trouble.message.strip().splitlines()[-1])

    def _announce(self, closed: Minimised | Duplicate, kernel: str) -> None:
        """Have every worker take later failures of this bug for known."""
        for oracle, kind in closed.shown_as:
            known = Known(kernel=kernel, oracle=oracle, kind=kind, features=closed.features, flaky=closed.flaky)
            self._known.append(known)
            self._broadcast(known)
        self._clear_busy(closed.finding)

    def _set_busy(self, number: int, finding: str, symptom: Symptom) -> None:
        self._busy[finding] = symptom, number
        self._broadcast(_busy(symptom, True), but=number)

    def _clear_busy(self, finding: str) -> None:
        if finding in self._busy:
            symptom, number = self._busy.pop(finding)
            self._broadcast(_busy(symptom, False), but=number)

    def _broadcast(self, message: msgspec.Struct, *, but: int | None = None) -> None:
        for number, worker in self._workers.items():
            if number != but:
                try:
                    worker.channel.send(message)
                except ChannelClosed:  # noticed when it is listened to
                    continue

    def _worker_ended(self, number: int) -> None:
        """A worker hung up: at the end as it should, before that because something is wrong with it."""
        tail = self._lose(number)
        if self._stopping or self._statistics.remaining_s() <= 0 or self._environment_fails:
            return
        self._restarts[number] = self._restarts.get(number, 0) + 1
        if number not in self._in_trouble:
            self._note_trouble(Trouble(message=f"worker {number} ended early: {tail or 'it said nothing'}"))
        if self._restarts[number] <= _MAX_RESTARTS_PER_WORKER:
            self._start(number)

    def _lose(self, number: int) -> str:
        worker = self._workers.pop(number)
        self._selector.unregister(worker.channel)
        if worker.broker is not None and worker.broker.fileno() in self._selector.get_map():
            self._selector.unregister(worker.broker)
        tail = worker.kill()
        for finding in self._book.abandon(number):
            self._clear_busy(finding.name)
        return tail


def _busy(symptom: Symptom, busy: bool) -> Busy:
    return Busy(kernel=symptom.kernel, oracle=symptom.oracle, kind=symptom.kind, busy=busy)
