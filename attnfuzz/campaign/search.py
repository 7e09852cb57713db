"""A worker's loop: rounds of drawn cases over the kernels, and a pursuit of every failure that is not known."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from attnfuzz.campaign.batch_size import BatchSize
from attnfuzz.campaign.channel import Channel
from attnfuzz.campaign.drawing import Drawing, StrategyFor
from attnfuzz.campaign.failures import Failures
from attnfuzz.campaign.formats import WorkingSets
from attnfuzz.campaign.history import History
from attnfuzz.campaign.judging import OutOfTime, TimedJudge, Unjudged
from attnfuzz.campaign.known_deaths import LEARNED_ORACLES
from attnfuzz.campaign.memory_watch import MemoryWatch
from attnfuzz.campaign.messages import Busy, FormatCompiled, Join, Known, Pursue, Setup, Stop, ToWorker
from attnfuzz.campaign.pipeline import Pipeline
from attnfuzz.campaign.retrace import retrace
from attnfuzz.campaign.schedule import Schedule
from attnfuzz.campaign.suspect import Suspect
from attnfuzz.campaign.tally import Tally
from attnfuzz.declaration import Declaration
from attnfuzz.judging.leaks import LEAK
from attnfuzz.oracles.verdict import Verdict, ends_process
from attnfuzz.problems.cases import Case, decode_case

__all__ = ["Search"]

_MOST_TOGETHER = 64
_WAIT_FOR_BATCH_S = 1.0
_MAX_RETRACES = 3


class Search:
    """Searches the kernels of ``setup`` until its deadline or until the coordinator says stop.

    ``formats`` are for a GPU, where a format that is new costs as much as hundreds of cases; without them, the format
    of each case is drawn too.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        judge: TimedJudge,
        strategy_for: StrategyFor,
        channel: Channel[ToWorker],
        history: History | None = None,
        memory: MemoryWatch | None = None,
        formats: WorkingSets | None = None,
    ) -> None:
        self._setup = setup
        self._judge = judge
        self._channel = channel
        self._history = History() if history is None else history
        self._memory = MemoryWatch(None) if memory is None else memory
        self._formats = formats
        self._drawing = Drawing(strategy_for, seeds=(setup.seed, setup.worker), formats=formats)
        self._kernels: dict[str, Declaration] = {}
        targets = [declaration.target for declaration in setup.kernels]
        self._schedule = Schedule(targets, worker=setup.worker, num_workers=setup.num_workers)
        self._tally = Tally(channel.send, device=setup.device_label)
        self._failures = Failures(
            setup.worker,
            deadline=setup.deadline,
            judge=judge,
            tally=self._tally,
            send=channel.send,
            is_over=self._is_over,
        )
        self._drawn: defaultdict[str, list[Case]] = defaultdict(list)
        self._sizes = defaultdict[str, BatchSize](lambda: BatchSize(_MOST_TOGETHER if judge.can_batch else 1))
        self._early: list[Pursue] = []
        self._pipeline = Pipeline(judge.together)
        self._retraces: Counter[str] = Counter()
        self._stopped = False
        for declaration in setup.kernels:
            self._join(Join(kernel=declaration))

    def run(self) -> None:
        """Search. Raises ChannelClosed when the coordinator is gone."""
        while not self._is_over():
            self._look_into_deferred()
            if not self._is_over():
                self._one_turn(self._kernels[self._schedule.next_target()])
        self._collect()
        self._pursue_suspect()  # no time to look into it, but it is reported
        self._look_into_deferred()
        self._tally.flush()

    def _is_over(self) -> bool:
        self._read_mail()
        return self._stopped or time.monotonic() >= self._setup.deadline

    def _read_mail(self) -> None:
        for message in self._channel.receive():
            match message:
                case Known():
                    self._failures.learn(message)
                    if message.kind == LEAK:
                        self._memory.leaks(message.kernel)
                    if message.oracle in LEARNED_ORACLES:
                        self._schedule.is_fatal(message.kernel)
                case Busy():
                    self._failures.set_busy(message)
                case Pursue():
                    self._defer(message)
                case FormatCompiled():
                    if self._formats is not None:
                        self._formats.offer(self._kernels[message.kernel], message.format)
                case Join():
                    self._join(message)
                case Stop():
                    self._stopped = True

    def _join(self, join: Join) -> None:
        """Search a kernel from now on, within what is built of it."""
        declaration, target = join.kernel, join.kernel.target
        self._tally.joins(declaration)
        self._schedule.add(target)
        if join.built:
            within = msgspec.structs.replace(declaration.supports, where=join.built)
            declaration = msgspec.structs.replace(declaration, supports=within)
        self._kernels[target] = declaration
        if self._formats is not None:
            self._formats.joins(declaration)
        early, self._early = self._early, []
        for pursue in early:
            self._defer(pursue)

    def _defer(self, pursue: Pursue) -> None:
        """Look into a failure that a worker which was lost had met."""
        declaration = self._kernels.get(pursue.kernel)
        if declaration is None:  # it is still being built
            self._early.append(pursue)
            return
        case = decode_case(declaration.problem, bytes(pursue.case))
        preceding = tuple(decode_case(declaration.problem, bytes(earlier)) for earlier in pursue.preceding)
        self._failures.defer(Suspect(declaration, case, pursue.failure, preceding))

    def _one_turn(self, declaration: Declaration) -> None:
        """One round on a kernel, and what follows from it."""
        target = declaration.target
        started = time.monotonic()
        cases_before = self._tally.cases(target)
        self._scout(declaration)
        if self._goes_on():
            until = started + self._slice_s(target, started)

            def visit(case: Case) -> bool:  # asked once at least, or the slice might end before the first case is drawn
                return self._visit(declaration, case) and time.monotonic() < until

            self._drawing.round(declaration, visit, until=self._setup.deadline)
            self._tally.flush()
        self._schedule.record(
            target, seconds=time.monotonic() - started, cases=self._tally.cases(target) - cases_before
        )
        self._pursue_suspect()

    def _scout(self, declaration: Declaration) -> None:
        """Have new formats compiled if it is time to; in the background, unless there are none to draw from."""
        if self._formats is None:
            return
        if drawn := self._drawing.scout(declaration):
            self._read_mail()
            self._have_judged(declaration, drawn)
        if not self._formats.any_for(declaration):
            self._collect()

    def _slice_s(self, target: str, now: float) -> float:
        return self._schedule.slice_s(target, max(0.0, self._setup.deadline - now))

    def _visit(self, declaration: Declaration, case: Case) -> bool:
        """Take a drawn case, and have it judged once there are enough for a batch; False ends the round."""
        target = declaration.target
        self._drawn[target].append(case)
        if len(self._drawn[target]) >= self._sizes[target].size:
            self._advance(declaration)
        return self._goes_on()

    def _goes_on(self) -> bool:
        return self._failures.suspect is None and not self._stopped and time.monotonic() < self._setup.deadline

    def _advance(self, declaration: Declaration) -> None:
        """Have judged what was drawn, as far as batches may be large."""
        self._read_mail()
        drawn, size = self._drawn[declaration.target], self._sizes[declaration.target].size
        cases = drawn[:size]
        del drawn[:size]
        self._have_judged(declaration, cases)

    def _have_judged(self, declaration: Declaration, cases: list[Case]) -> None:
        """Take in what has been judged, then have ``cases`` judged: a batch in the background, a single one at once."""
        self._collect()
        if not self._goes_on():
            self._drawn[declaration.target].extend(cases)
            return
        cases = [case for case in cases if not self._skips(declaration, case)]
        deaths = self._failures.deaths
        alone = [case for case in cases if len(cases) == 1 or deaths.expects_death(declaration, case)]
        alone += [case for case in cases if case not in alone and deaths.faults.covers(declaration, case)]
        self._judge_alone(declaration, alone)
        if together := [case for case in cases if case not in alone]:
            self._pipeline.submit(declaration, together)

    def _collect(self) -> None:
        """Take in the batch that is being judged, if there is one; not for long once the campaign is over."""
        batch = self._pipeline.collect(_WAIT_FOR_BATCH_S)
        while batch is None and self._pipeline.is_busy and not self._stopped:
            self._read_mail()
            batch = self._pipeline.collect(_WAIT_FOR_BATCH_S)
        if batch is None:
            return
        target = batch.declaration.target
        if batch.verdicts is None:
            self._sizes[target].went_wrong()
            before = self._history.of(batch.declaration)
            if not self._judge_alone(batch.declaration, batch.cases):
                self._retrace(batch.declaration, before)
            return
        self._sizes[target].went_well(batch.warm_seconds, len(batch.cases))
        for case, verdict in zip(batch.cases, batch.verdicts, strict=True):
            self._take_in(batch.declaration, case, batch.case_seconds(verdict), verdict)
        self._look_for_leak()

    def _look_for_leak(self) -> None:
        """Find out about a kernel that has made the executor grow."""
        suspected = self._memory.suspect
        if suspected is None or not self._goes_on():
            return
        declaration, case = suspected
        started = time.monotonic()
        try:
            failure = self._judge.find_leak(declaration, case)
        except OutOfTime:
            return
        except Unjudged:
            failure = None
        self._schedule.charge(declaration.target, time.monotonic() - started)
        self._memory.checked(declaration, leaks=failure is not None)
        if failure is not None:
            self._weigh(Suspect(declaration, case, failure), 0.0)

    def _retrace(self, declaration: Declaration, cases: Sequence[Case]) -> None:
        """Find out what took a batch down that no case of it takes down alone."""
        self._retraces[declaration.target] += 1
        if self._retraces[declaration.target] <= _MAX_RETRACES and self._goes_on():
            suspect = retrace(self._judge, declaration, cases)
            if suspect is not None:
                self._weigh(suspect, 0.0)

    def _judge_alone(self, declaration: Declaration, cases: Sequence[Case]) -> bool:
        """One after the other, up to a suspect; the rest waits for the kernel's next round. Whether any failed."""
        failed = False
        for i, case in enumerate(cases):
            if not self._goes_on():
                self._drawn[declaration.target].extend(cases[i:])
                break
            started = time.monotonic()
            try:
                relations = self._failures.deaths.faults.relations_for(declaration, case)
                verdict = self._judge(declaration, case, relations=relations)
            except OutOfTime:
                break
            except Unjudged:
                failed = True
                continue
            failed |= verdict.failure is not None
            seconds = time.monotonic() - started
            if verdict.failure is None:
                self._sizes[declaration.target].went_well(max(0.0, seconds - verdict.timing.compile_s), 1)
            self._take_in(declaration, case, seconds, verdict)
            self._look_for_leak()
        return failed

    def _take_in(self, declaration: Declaration, case: Case, seconds: float, verdict: Verdict) -> None:
        self._tally.judged(declaration, case, seconds, verdict)
        failure = verdict.failure
        self._failures.deaths.judged(declaration, case, failure)
        if ends_process(failure):
            self._sizes[declaration.target].went_wrong()
        else:
            self._publish_format(declaration, case, seconds)
        if failure is not None:
            self._weigh(Suspect(declaration, case, failure, self._history.before(declaration, case)), seconds)

    def _publish_format(self, declaration: Declaration, case: Case, seconds: float) -> None:
        format_ = None if self._formats is None else self._formats.judged(declaration, case, seconds)
        if format_ is not None:
            self._channel.send(FormatCompiled(kernel=declaration.target, format=format_))

    def _weigh(self, suspect: Suspect, seconds: float) -> None:
        self._read_mail()
        if not self._stopped:
            self._failures.weigh(suspect, seconds)

    def _skips(self, declaration: Declaration, case: Case) -> bool:
        """Whether to leave out the case because it would die, which costs an executor."""
        skipped = self._failures.deaths.forbids(declaration, case)
        if skipped:
            self._tally.skipped(declaration.target)
        return skipped

    def _look_into_deferred(self) -> None:
        """Take up failures put off while somebody was at their symptom."""
        while not self._stopped and self._failures.take_up_deferred():
            self._pursue_suspect()

    def _pursue_suspect(self) -> None:
        """Find out about the suspect, if there is one; what is being judged in the background is taken in before."""
        if self._failures.suspect is None:
            return
        started = time.monotonic()
        self._collect()
        suspect, self._failures.suspect = self._failures.suspect, None
        target = suspect.declaration.target
        self._sizes[target].went_wrong()
        self._failures.pursue(suspect)
        self._schedule.charge(target, time.monotonic() - started)
