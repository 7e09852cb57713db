"""A worker's loop: rounds of drawn cases over the kernels, and a pursuit of every failure that is not known."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from hypothesis.strategies import SearchStrategy

from attnfuzz.campaign.batch_size import BatchSize
from attnfuzz.campaign.behind_known import relatives_beyond
from attnfuzz.campaign.channel import Channel
from attnfuzz.campaign.generation import derive_seed, run_round
from attnfuzz.campaign.history import History
from attnfuzz.campaign.judging import OutOfTime, TimedJudge, Unjudged
from attnfuzz.campaign.known_deaths import FATAL_ORACLES, KnownDeaths
from attnfuzz.campaign.messages import Busy, Known, Pursue, Setup, Stop, ToWorker
from attnfuzz.campaign.pipeline import Pipeline
from attnfuzz.campaign.pursuit import Pursuit, Suspect
from attnfuzz.campaign.retrace import retrace
from attnfuzz.campaign.schedule import Schedule
from attnfuzz.campaign.signature import KnownFindings, Signature, Symptom
from attnfuzz.campaign.tally import Tally
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Verdict
from attnfuzz.problems.cases import Case, decode_case, encode_case

__all__ = ["Search", "StrategyFor"]

StrategyFor = Callable[[Declaration], SearchStrategy[Case]]

_SHARE_BEHIND_KNOWN = 0.15
"""Part of a kernel's time that may go into looking for bugs that hide behind known ones."""
_RELATIVES_TRIED = 4
_MAX_DEFERRED = 64
_MOST_TOGETHER = 32
_WAIT_FOR_BATCH_S = 1.0
_MAX_REMEMBERED = 100_000
_MAX_RETRACES = 3
_MAX_DOUBTS = 3
"""Failures of one symptom that are looked into although none of them ever came back."""


class Search:
    """Searches the kernels of ``setup`` until its deadline or until the coordinator says stop."""

    def __init__(
        self,
        setup: Setup,
        *,
        judge: TimedJudge,
        strategy_for: StrategyFor,
        channel: Channel[ToWorker],
        history: History | None = None,
    ) -> None:
        self._setup = setup
        self._judge = judge
        self._strategy_for = strategy_for
        self._channel = channel
        self._history = History() if history is None else history
        self._kernels = {declaration.target: declaration for declaration in setup.kernels}
        self._schedule = Schedule(list(self._kernels), worker=setup.worker, num_workers=setup.num_workers)
        self._tally = Tally(channel.send, device=setup.device_id)
        self._known = KnownFindings()
        self._deaths = KnownDeaths(self._tally.share_of_known_deaths)
        self._seen: dict[str, set[int]] = {target: set() for target in self._kernels}
        self._drawn: dict[str, list[Case]] = {target: [] for target in self._kernels}
        self._sizes = {target: BatchSize(_MOST_TOGETHER if judge.can_batch else 1) for target in self._kernels}
        self._pipeline = Pipeline(judge.together)
        self._deferred: deque[Suspect] = deque(maxlen=_MAX_DEFERRED)
        self._suspect: Suspect | None = None
        self._doubts: Counter[Symptom] = Counter()
        self._retraces: Counter[str] = Counter()
        self._stopped = False
        self._findings = 0

    def run(self) -> None:
        """Search. Raises ChannelClosed when the coordinator is gone."""
        while not self._is_over():
            self._look_into_deferred()
            if not self._is_over():
                self._one_turn(self._schedule.next_target())
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
                case Known(kernel=kernel, oracle=oracle, kind=kind):
                    signature = Signature(Symptom(kernel, oracle, kind), message.features)
                    self._known.add(signature, flaky=message.flaky)
                    if not message.flaky:
                        self._deaths.learn(signature)
                case Busy(kernel=kernel, oracle=oracle, kind=kind, busy=busy):
                    self._known.set_busy(Symptom(kernel, oracle, kind), busy)
                case Pursue():
                    self._defer(message)
                case Stop():
                    self._stopped = True

    def _defer(self, pursue: Pursue) -> None:
        """Look into a failure that a worker which was lost had met."""
        declaration = self._kernels[pursue.kernel]
        case = decode_case(declaration.problem, bytes(pursue.case))
        self._deferred.append(Suspect(declaration, case, pursue.failure))

    def _one_turn(self, target: str) -> None:
        """One round on a kernel, and what follows from it."""
        started = time.monotonic()
        cases_before = self._tally.cases(target)
        self._round(self._kernels[target], until=started + self._slice_s(target, started))
        self._schedule.record(
            target, seconds=time.monotonic() - started, cases=self._tally.cases(target) - cases_before
        )
        self._pursue_suspect()

    def _slice_s(self, target: str, now: float) -> float:
        return self._schedule.slice_s(target, max(0.0, self._setup.deadline - now))

    def _round(self, declaration: Declaration, *, until: float) -> None:
        seed_value = derive_seed(
            self._setup.seed, self._setup.worker, declaration.target, self._schedule.rounds(declaration.target)
        )
        run_round(
            self._strategy_for(declaration),
            lambda case: self._visit(declaration, case),
            seed_value=seed_value,
            until=until,
        )
        self._tally.flush()

    def _visit(self, declaration: Declaration, case: Case) -> bool:
        """Take a drawn case, and have it judged once there are enough for a batch; False ends the round."""
        target = declaration.target
        if self._is_new(target, case):
            self._drawn[target].append(case)
            if len(self._drawn[target]) >= self._sizes[target].size:
                self._advance(declaration)
        return self._goes_on()

    def _is_new(self, target: str, case: Case) -> bool:
        seen, fingerprint = self._seen[target], hash(encode_case(case))
        if fingerprint in seen:
            return False
        if len(seen) >= _MAX_REMEMBERED:  # of a campaign of hours: repetitions of long ago do no harm
            seen.clear()
        seen.add(fingerprint)
        return True

    def _goes_on(self) -> bool:
        return self._suspect is None and not self._stopped and time.monotonic() < self._setup.deadline

    def _advance(self, declaration: Declaration) -> None:
        """Weigh what has been judged, then have judged what was drawn: a batch in the background, a case at once."""
        self._read_mail()
        self._collect()
        if not self._goes_on():
            return
        drawn, size = self._drawn[declaration.target], self._sizes[declaration.target].size
        cases = [case for case in drawn[:size] if not self._skips(declaration, case)]
        del drawn[:size]
        alone = [case for case in cases if len(cases) == 1 or self._deaths.expects_death(declaration, case)]
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
                verdict = self._judge(declaration, case)
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
        return failed

    def _take_in(self, declaration: Declaration, case: Case, seconds: float, verdict: Verdict) -> None:
        self._tally.judged(declaration, case, seconds, verdict)
        if verdict.failure is not None and verdict.failure.oracle in FATAL_ORACLES:
            self._sizes[declaration.target].went_wrong()
            self._deaths.died(declaration, case)
        else:
            self._deaths.passed(declaration, case)
        if verdict.failure is not None:
            preceding = self._history.before(declaration, case)
            self._weigh(Suspect(declaration, case, verdict.failure, preceding), seconds)

    def _weigh(self, suspect: Suspect, seconds: float) -> None:
        """Pass silently over what is known, put off what somebody is at already, and take the rest for a suspect."""
        self._read_mail()
        if self._stopped:
            return
        if self._is_known(suspect):
            self._pass_over(suspect, seconds)
        elif self._suspect is not None or self._known.is_busy(suspect.symptom):
            self._deferred.append(suspect)
        else:
            self._suspect = suspect

    def _pass_over(self, suspect: Suspect, seconds: float) -> None:
        """Count a known failure, and now and then look whether another bug hides behind it."""
        target = suspect.declaration.target
        deadly = suspect.failure.oracle in FATAL_ORACLES
        self._tally.known(target, seconds if deadly else 0.0)
        if deadly or self._suspect is not None or self._tally.share_behind_known(target) >= _SHARE_BEHIND_KNOWN:
            return
        started = time.monotonic()
        self._suspect = self._hidden_behind(suspect)
        self._tally.looked_behind_known(target, time.monotonic() - started)

    def _hidden_behind(self, suspect: Suspect) -> Suspect | None:
        for case in relatives_beyond(self._known, suspect)[:_RELATIVES_TRIED]:
            try:
                failure = self._judge(suspect.declaration, case).failure
            except (OutOfTime, Unjudged):
                return None
            if failure is not None and not self._is_known(found := Suspect(suspect.declaration, case, failure)):
                return None if self._known.is_busy(found.symptom) else found
        return None

    def _is_known(self, suspect: Suspect) -> bool:
        symptom = suspect.symptom
        if self._doubts[symptom] >= _MAX_DOUBTS:
            return True
        if not self._known.has_symptom(symptom):
            return False
        return self._known.explains(symptom, suspect.features)

    def _skips(self, declaration: Declaration, case: Case) -> bool:
        """Whether to leave out the case because it would die, which costs an executor."""
        skipped = self._deaths.forbids(declaration, case)
        if skipped:
            self._tally.skipped(declaration.target)
        return skipped

    def _look_into_deferred(self) -> None:
        """Take up failures put off while somebody was at their symptom, unless what was found explains them."""
        for _ in range(len(self._deferred)):
            suspect = self._deferred.popleft()
            if self._known.is_busy(suspect.symptom):
                self._deferred.append(suspect)
            elif self._is_known(suspect):
                self._tally.known(suspect.declaration.target, 0.0)
            elif not self._stopped:
                self._suspect = suspect
                self._pursue_suspect()

    def _pursue_suspect(self) -> None:
        """Find out about the suspect, if there is one; what is being judged in the background is taken in before."""
        if self._suspect is None:
            return
        started = time.monotonic()
        self._collect()
        suspect, self._suspect = self._suspect, None
        self._sizes[suspect.declaration.target].went_wrong()
        self._pursue(suspect)
        self._schedule.charge(suspect.declaration.target, time.monotonic() - started)

    def _pursue(self, suspect: Suspect) -> None:
        self._findings += 1
        pursuit = Pursuit(
            f"{self._setup.worker}-{self._findings}",
            suspect,
            judge=self._judge,
            known=self._known,
            deaths=self._deaths,
            send=self._channel.send,
            is_over=self._is_over,
            deadline=self._setup.deadline,
        )
        if not pursuit.run():
            self._doubts[suspect.symptom] += 1
