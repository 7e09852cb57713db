"""The coordinator: starts the workers, listens to them, keeps the budget and the findings."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import msgspec

from attnfuzz.campaign.declaration_inference import adopting, with_declared
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.finding_book import FindingBook
from attnfuzz.campaign.messages import (
    Adopted,
    Begin,
    Busy,
    Confirmed,
    Duplicate,
    FormatCompiled,
    Found,
    FromWorker,
    Join,
    Minimised,
    Ready,
    Setup,
    Smaller,
    Trouble,
    Unconfirmed,
    Unfinished,
)
from attnfuzz.campaign.readiness import Readiness
from attnfuzz.campaign.request import CampaignRequest
from attnfuzz.campaign.result import LEAST_SEARCH_S, CampaignResult, Reporter, Statistics, StopReason, forgiving
from attnfuzz.campaign.saved.saving import SaveFolder
from attnfuzz.campaign.saved.state import CampaignState, StateWriter
from attnfuzz.campaign.statistics import WorkerProgress
from attnfuzz.campaign.stopping import Interrupts
from attnfuzz.campaign.workers import LastWords, StartWorker, Workers
from attnfuzz.identity.bug import Bug, KnownBugs, Symptom
from attnfuzz.internal_errors import in_one_sentence
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.supports import Supports, as_call

_Key: TypeAlias = tuple[str, bytes]
_MAX_TIMES = 2
"""How often a failure is handed on: one that takes every worker with it would otherwise never be left alone."""


class UnclaimedFailures:
    """Failures whose worker was lost before it was done with them: another one looks into them again.

    Nothing is in it twice.
    """

    def __init__(self) -> None:
        self._waiting: dict[_Key, Unfinished] = {}
        self._sent: set[_Key] = set()
        self._times: Counter[_Key] = Counter()

    def add(self, unfinished: Unfinished) -> None:
        """Take over a failure."""
        key = unfinished.key
        self._times[key] += 1
        self._sent.discard(key)
        self._waiting[key] = unfinished

    def take(self) -> list[Unfinished]:
        """Failures that are to be sent to a worker now."""
        keys = [key for key in self._waiting if key not in self._sent and self._times[key] <= _MAX_TIMES]
        self._sent.update(keys)
        return [self._waiting[key] for key in keys]

    def taken_up(self, found: Found) -> None:
        """A worker looks into this one: from now on it is a finding like any other."""
        self._waiting.pop((found.kernel, bytes(found.case)), None)

    def left(self) -> list[Unfinished]:
        """Failures that no worker has taken up."""
        return list(self._waiting.values())


_TICK_S = 0.25
_WAIT_FOR_WORKERS_S = 3.0
_HOUSEKEEPING_EVERY_S = 5.0
_FORMATS_KEPT = 32
"""Formats of each kernel that are kept for workers that start later."""
_KILLS = ("SIGKILL", "SIGTERM")
_MOST_LATE_S = 5.0
"""How long a search may go on when its budget is spent, so that kernels are searched within what they take."""


class Coordinator:
    """One campaign as ``request`` asks for it, of the kernels and within the times of ``statistics``.

    ``launch`` starts a worker. ``readiness`` tells which kernels are ready, and which become so; without it all are.
    Workers take turns at ``device_ids``, as CUDA_VISIBLE_DEVICES names GPUs; without any they share what there is.
    ``checkpoints`` writes what is needed to go on with the campaign.
    """

    def __init__(
        self,
        request: CampaignRequest,
        statistics: Statistics,
        *,
        launch: StartWorker,
        reporter: Reporter,
        readiness: Readiness | None = None,
        checkpoints: StateWriter | None = None,
        journal_folder: Path | None = None,
        memory_limit_bytes: int | None = None,
        device_ids: tuple[str, ...] = (),
    ) -> None:
        self._request = request
        self._statistics = statistics
        self._reporter = forgiving(reporter)
        self._readiness = readiness
        self._checkpoints = checkpoints
        self._journal_folder = journal_folder
        self._memory_limit_bytes = memory_limit_bytes
        self._all_devices = device_ids
        self._kernels = {target: kernel.declaration for target, kernel in statistics.kernels.items()}
        ready = self._kernels.values() if readiness is None else readiness.ready
        self._joined = {one.target: Join(kernel=one) for one in ready}
        self._book = FindingBook(
            self._kernels,
            started=statistics.started,
            folder=SaveFolder(request.save_folder, device=statistics.device_name, warn=self._reporter.note),
            reporter=self._reporter,
            python=statistics.python,
        )
        statistics.findings = self._book.findings
        self._workers = Workers(statistics.workers, launch=launch, setup_for=self._setup)
        self._unclaimed = UnclaimedFailures()
        self._adopted: dict[str, dict[str, str]] = {}
        self._known: list[Bug] = []
        self._cut_off: set[Bug] = set()
        self._compiled: dict[str, deque[FormatCompiled]] = {one: deque(maxlen=_FORMATS_KEPT) for one in self._kernels}
        self._busy: dict[str, tuple[Symptom, int]] = {}
        self._device_ids: dict[int, str] = {}
        self._lost_devices: set[str] = set()
        self._troubles: list[str] = []
        self._of_problems: set[str] = set()
        self._heard_of: set[str] = set()
        self._in_trouble: set[int] = set()
        self._compiling: set[int] = set()
        self._fail_fast_hit = False
        self._environment_fails = False
        self._stopping = False
        self._settled_at: float | None = None if readiness is not None and readiness.asking else -math.inf
        """When it became known what all kernels take; long ago, if that was never asked."""
        self._next_housekeeping = time.monotonic() + _HOUSEKEEPING_EVERY_S
        if request.resume is not None:
            self._resume(request.resume)

    def _resume(self, state: CampaignState) -> None:
        """Go on with what an earlier part of the campaign had found, and look into what it was not done with."""
        self._known.extend(state.known)
        for number, finding in enumerate(state.findings):
            self._book.restore(finding, f"resumed-{number}")
        for unfinished in state.pending:
            self._unclaimed.add(unfinished)

    @property
    def has_lost_device(self) -> bool:
        """Whether a GPU has stopped answering."""
        return bool(self._lost_devices)

    def run(self, interrupts: Interrupts | None = None) -> CampaignResult:
        """Search until the budget is spent, or another reason to stop comes first. ``interrupts`` has been entered."""
        with nullcontext(interrupts) if interrupts is not None else Interrupts() as entered:
            entered.raising = False
            try:
                self._reporter.started(self._statistics)
                self._checkpoint()
                self._have_join()
                while (reason := self._reason_to_stop(entered)) is None:
                    self._start_due()
                    self._listen(_TICK_S)
                    if self._lost_devices:
                        self._give_up_lost_devices()
                    self._keep_house()
                asked = {} if self._readiness is None or reason != "budget" else self._readiness.stop_asking()
                self._finish(entered)
                self._checkpoint(ended=reason)
            finally:
                self._workers.close()
                self._reporter.finished()
        return CampaignResult(
            stop_reason=reason,
            elapsed_s=self._statistics.elapsed_s(),
            statistics=self._statistics,
            findings=tuple(sorted(self._book.findings, key=lambda one: (one.shrunk_s is None, one.first_seen_s))),
            unconfirmed=tuple(self._book.unconfirmed),
            troubles=tuple(self._troubles),
            of_problems=frozenset(self._of_problems),
            signal=entered.first,
            unbuilt={} if self._readiness is None else self._readiness.unbuilt,
            unsettled=asked,
        )

    def _reason_to_stop(self, interrupts: Interrupts) -> StopReason | None:
        if interrupts.count:
            return "interrupted"
        if self._fail_fast_hit:
            return "fail_fast"
        if self._environment_fails:
            return "environment"
        if self._is_spent():
            return "budget"
        if self._workers.is_lost:
            return "environment" if self._lost_devices else "workers_lost"
        return None

    def _is_spent(self) -> bool:
        """Whether the budget is; where it was not known for long what kernels take, they are searched a little then."""
        now, budget_ends = time.monotonic(), self._statistics.deadline
        if self._settled_at is None:
            return now >= budget_ends + _MOST_LATE_S
        searched_until = self._settled_at + min(LEAST_SEARCH_S, self._statistics.budget_s)
        return now >= max(budget_ends, min(searched_until, budget_ends + _MOST_LATE_S))

    def _finish(self, interrupts: Interrupts) -> None:
        """Have the workers end, wait a little for what they still have to say, then end them."""
        self._stopping = True
        self._workers.stop()
        patience = time.monotonic() + _WAIT_FOR_WORKERS_S
        while self._workers.working and time.monotonic() < patience and interrupts.count < 2:
            self._listen(0.05)
        for number in self._workers.working:
            self._lose(number)
        known = KnownBugs(self._known)
        for unfinished in self._unclaimed.left():  # which nobody was left to look into
            self._book.accept_unfinished(unfinished, unless=known)
        self._book.save_all()

    def _start_due(self) -> None:
        try:
            started = self._workers.start_due()
        except OSError as error:
            self._environment_fails = True
            self._note_trouble(f"no worker can be started ({error}); free memory, disk space or process IDs")
            return
        for number in started:
            self._in_trouble.discard(number)
            partly = [one for one in self._joined.values() if one.is_in_part]
            for message in (*partly, *self._known, *(_busy(symptom, True) for symptom, _ in self._busy.values())):
                self._workers.send(number, message)
            for compiled in chain.from_iterable(self._compiled.values()):
                self._workers.send(number, compiled)
            self._hand_over(number)

    def _hand_over(self, number: int) -> None:
        for unfinished in self._unclaimed.take():
            self._workers.send(number, unfinished)

    def _setup(self, number: int, starts: int) -> Setup:
        request, statistics = self._request, self._statistics
        device_ids = self._all_devices or ("",)
        self._device_ids[number] = device_ids[number % len(device_ids)]
        return Setup(
            worker=number,
            num_workers=statistics.workers,
            seed=statistics.seed + (starts << 32) + ((request.resume.parts if request.resume is not None else 0) << 64),
            kernels=tuple(one.kernel for one in self._joined.values() if not one.is_in_part),
            deadline=statistics.deadline,
            device=statistics.device,
            oracles=request.judging_oracles,
            journal=str(self._journal_folder / f"worker-{number}.json") if self._journal_folder else "",
            tolerance=request.tolerance,
            watching=request.verifying,
            import_patience_s=request.import_patience_s,
            python="" if request.python is None else str(request.python.path),
            max_seq_len=request.max_seq_len,
            max_seqs=request.max_seqs,
            memory_limit_bytes=self._memory_limit_bytes,
            device_id=self._device_ids[number],
            device_label=str(device_ids.index(self._device_ids[number])) if self._all_devices else "",
            sharing=-(-statistics.workers // len(device_ids)),
            adopting=self._readiness is not None and not (request.pedantic or request.verifying),
        )

    def _listen(self, timeout_s: float) -> None:
        for number, messages in self._workers.receive(timeout_s):
            if messages is None:
                self._worker_ended(number)
            else:
                for message in messages:
                    self._handle(number, message)
        self._workers.flush()
        self._reporter.progress(self._statistics)

    def _have_join(self) -> None:
        """Have kernels searched that have become ready for it."""
        if self._readiness is None:
            return
        for join in self._readiness.take():
            self._take_up(join)
        for question, declaration in self._readiness.take_questions():
            self._book.ask(question, declaration)
        if failures := self._readiness.take_failures():
            for unfinished in failures:
                self._unclaimed.add(unfinished)
            for number in self._workers.working[:1]:  # or the first that is started
                self._hand_over(number)
        self._statistics.asking = len(self._readiness.asking)
        if not self._readiness.asking and self._settled_at is None:
            self._settled_at = time.monotonic()

    def _take_up(self, join: Join) -> None:
        """Have a kernel searched as ``join`` says, and as what the search has found out of it."""
        target = join.kernel.target
        if not join.is_settled:
            self._joined[target] = join
            self._workers.broadcast(join)
            return
        kernel = with_declared(join.kernel, Supports(), adopting(Numerics(), self._adopted.get(target, {})))
        known = self._joined.get(target)
        self._joined[target] = join = msgspec.structs.replace(join, kernel=kernel)
        if known is None or not known.is_settled:
            self._book.settle(kernel)
        self._kernels[target] = self._statistics.kernels[target].declaration = kernel
        self._workers.broadcast(join)

    def _adopt(self, message: Adopted) -> None:
        """Search a kernel as the design that it has turned out to be; what told of that is no finding."""
        self._book.forget(message.finding)
        self._adopted[message.kernel] = message.numerics | self._adopted.get(message.kernel, {})
        if self._readiness is not None:
            self._readiness.adopt(message)
        self._take_up(self._joined[message.kernel])
        told = as_call("Numerics", self._kernels[message.kernel].numerics.declared())
        self._reporter.note(f"{message.kernel} is searched with {told} from now on, as its numbers say")

    def _keep_house(self) -> None:
        self._have_join()
        if time.monotonic() >= self._next_housekeeping:
            self._book.save_all()
            self._workers.end_stopped()
            self._next_housekeeping = time.monotonic() + _HOUSEKEEPING_EVERY_S
        if self._checkpoints is not None and self._checkpoints.is_due:
            self._checkpoint()

    def _checkpoint(self, *, ended: StopReason | None = None) -> None:
        """Write what is needed to go on from here; nothing is left of a campaign that spent its budget."""
        checkpoints = self._checkpoints
        if checkpoints is None:
            return
        if ended == "budget":
            checkpoints.remove()
            return
        known = [
            msgspec.structs.replace(one, finding=self._book.standing_for(one.finding))
            for one in self._known
            if one not in self._cut_off
        ]
        pending = (*self._unclaimed.left(), *self._book.pending())
        checkpoints.write(self._statistics, self._book.findings, known, pending)

    def _handle(self, number: int, message: FromWorker) -> None:
        match message:
            case Ready():
                self._statistics.begin()
                if self._statistics.device == "cuda":
                    self._compiling.add(number)
                    self._statistics.compiling = len(self._compiling)
                late_s = 0.0 if self._settled_at is not None else _MOST_LATE_S
                self._workers.send(number, Begin(deadline=self._statistics.deadline + late_s))
            case WorkerProgress():
                self._statistics.add(message)
                self._book.seen_again(message.known_by_finding)
                self._workers.has_judged(number)
                self._compiling.discard(number)
                self._statistics.compiling = len(self._compiling)
            case FormatCompiled():
                self._compiled[message.kernel].append(message)
                self._workers.broadcast(message, but=number)
            case Found():
                self._unclaimed.taken_up(message)
                symptom = self._book.found(message).symptom
                self._busy[message.finding] = symptom, number
                self._workers.broadcast(_busy(symptom, True), but=number)
            case Confirmed():
                self._book.confirmed(message)
            case Unconfirmed():
                self._book.unconfirmed_by(message)
                self._clear_busy(message.finding)
            case Smaller():
                self._book.smaller(message)
            case Minimised():
                finding = self._book.minimised(message)
                self._announce(message, finding)
                self._fail_fast_hit |= self._request.fail_fast and self._statistics.disposition(finding) == "counts"
            case Duplicate():
                self._announce(message, self._book.duplicate(message))
            case Adopted():
                self._adopt(message)
                self._clear_busy(message.finding)
            case Trouble():
                self._in_trouble.add(number)
                self._note_trouble(message.message, of_problem=message.of_problem)
                self._environment_fails |= message.environment and not message.device_lost
                if message.device_lost:
                    self._lost_devices.add(self._device_ids.get(number, ""))

    def _note_trouble(self, message: str, *, of_problem: bool = False) -> None:
        if message not in self._heard_of:
            self._heard_of.add(message)
            if (sentence := in_one_sentence(message)) not in self._troubles:
                self._troubles.append(sentence)
                self._of_problems |= {sentence} if of_problem else set()
                self._reporter.note(sentence.partition("\n")[0])

    def _give_up_lost_devices(self) -> None:
        """End all workers on a GPU that does not answer; what they were at is taken up elsewhere, if there is a GPU."""
        for number, device_id in self._device_ids.items():
            if device_id in self._lost_devices and self._workers.give_up(number):
                self._lose(number)
        if self._workers.working:
            self._hand_over(self._workers.working[0])

    def _announce(self, closed: Minimised | Duplicate, finding: Finding) -> None:
        """Have every worker take later failures of this bug for known."""
        known = [msgspec.structs.replace(bug, finding=finding.tag) for bug in closed.bugs]
        if isinstance(closed, Minimised) and not closed.complete:
            self._cut_off.update(known)
        self._known += known
        for one in known:
            self._workers.broadcast(one)
        self._clear_busy(closed.finding)
        if self._checkpoints is not None:
            self._checkpoints.news()

    def _clear_busy(self, finding: str) -> None:
        if finding in self._busy:
            symptom, number = self._busy.pop(finding)
            self._workers.broadcast(_busy(symptom, False), but=number)

    def _worker_ended(self, number: int) -> None:
        """A worker hung up: at the end as it should, before that because something is wrong with it."""
        last_words = self._lose(number, hung_up=True)
        if self._stopping or self._statistics.remaining_s() <= 0 or self._environment_fails:
            return
        is_killed = last_words.signal_name in _KILLS
        if number not in self._in_trouble and is_killed:  # somebody's doing, or the system's; nothing to repair here
            self._reporter.note(f"worker {number} was killed ({last_words.signal_name}) and is started again")
        elif number not in self._in_trouble:
            what = last_words.signal_name or last_words.tail or "it said nothing"
            self._note_trouble(f"worker {number} ended early: {what}")
        if not self._workers.start_again(number, killed=is_killed) and self._workers.working:
            self._hand_over(self._workers.working[0])

    def _lose(self, number: int, *, hung_up: bool = False) -> LastWords:
        last_words = self._workers.lose(number, hung_up=hung_up)
        self._compiling.discard(number)
        for finding in self._book.abandon(number, ends=self._stopping):
            self._clear_busy(finding.name)
            if not self._stopping:
                self._unclaimed.add(finding.unfinished())
        return last_words


def _busy(symptom: Symptom, busy: bool) -> Busy:
    return Busy(kernel=symptom.kernel, oracle=symptom.oracle, kind=symptom.kind, busy=busy)
