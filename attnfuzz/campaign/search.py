"""A worker's loop: rounds of drawn cases over the kernels, and a pursuit of every failure that is not known."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from hypothesis.strategies import SearchStrategy

from attnfuzz.campaign.behind_known import relatives_beyond
from attnfuzz.campaign.channel import Channel
from attnfuzz.campaign.generation import derive_seed, run_round
from attnfuzz.campaign.judging import OutOfTime, TimedJudge, Unjudged
from attnfuzz.campaign.messages import Busy, Known, Setup, Stop, ToWorker
from attnfuzz.campaign.pursuit import Pursuit, Suspect
from attnfuzz.campaign.schedule import Schedule
from attnfuzz.campaign.signature import KnownFindings, Signature, Symptom, case_features
from attnfuzz.campaign.tally import Tally
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case, encode_case

__all__ = ["Search", "StrategyFor"]

StrategyFor = Callable[[Declaration], SearchStrategy[Case]]

_FATAL_ORACLES = frozenset({"crash", "hang"})
_SHARE_FOR_KNOWN_DEATHS = 0.2
"""Part of a kernel's time that may go into cases that are expected to crash or hang as an earlier one did."""
_SHARE_BEHIND_KNOWN = 0.15
"""Part of a kernel's time that may go into looking for bugs that hide behind known ones."""
_RELATIVES_TRIED = 4
_MAX_DEFERRED = 16
_MAX_REMEMBERED = 100_000
_MAX_DOUBTS = 3
"""Failures of one symptom that are looked into although none of them ever came back."""


class Search:
    """Searches the kernels of ``setup`` until its deadline or until the coordinator says stop."""

    def __init__(
        self, setup: Setup, *, judge: TimedJudge, strategy_for: StrategyFor, channel: Channel[ToWorker]
    ) -> None:
        self._setup = setup
        self._judge = judge
        self._strategy_for = strategy_for
        self._channel = channel
        self._kernels = {declaration.target: declaration for declaration in setup.kernels}
        self._schedule = Schedule(list(self._kernels), worker=setup.worker, num_workers=setup.num_workers)
        self._tally = Tally(channel.send)
        self._known = KnownFindings()
        self._passed: dict[str, set[int]] = {target: set() for target in self._kernels}
        self._deferred: deque[Suspect] = deque(maxlen=_MAX_DEFERRED)
        self._suspect: Suspect | None = None
        self._doubts: Counter[Symptom] = Counter()
        self._stopped = False
        self._findings = 0

    def run(self) -> None:
        """Search. Raises ChannelClosed when the coordinator is gone."""
        while not self._is_over():
            self._look_into_deferred()
            if not self._is_over():
                self._one_turn(self._schedule.next_target())
        self._tally.flush()

    def _is_over(self) -> bool:
        self._read_mail()
        return self._stopped or time.monotonic() >= self._setup.deadline

    def _read_mail(self) -> None:
        for message in self._channel.receive():
            match message:
                case Known(kernel=kernel, oracle=oracle, kind=kind):
                    self._known.add(Signature(Symptom(kernel, oracle, kind), message.features), flaky=message.flaky)
                case Busy(kernel=kernel, oracle=oracle, kind=kind, busy=busy):
                    self._known.set_busy(Symptom(kernel, oracle, kind), busy)
                case Stop():
                    self._stopped = True

    def _one_turn(self, target: str) -> None:
        """One round on a kernel, and what follows from it."""
        started = time.monotonic()
        cases_before = self._tally.cases(target)
        self._round(self._kernels[target], until=started + self._slice_s(target, started))
        if self._suspect is not None:
            self._pursue(self._suspect)
        self._schedule.record(
            target, seconds=time.monotonic() - started, cases=self._tally.cases(target) - cases_before
        )

    def _slice_s(self, target: str, now: float) -> float:
        return self._schedule.slice_s(target, max(0.0, self._setup.deadline - now))

    def _round(self, declaration: Declaration, *, until: float) -> None:
        self._suspect = None
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
        """Judge a drawn case; False ends the round."""
        fingerprint = hash(encode_case(case))
        passed = self._passed[declaration.target]
        if fingerprint in passed:
            return True
        if self._would_die_again(declaration, case):
            self._tally.skipped(declaration.target)
            return True
        started = time.monotonic()
        try:
            verdict = self._judge(declaration, case)
        except OutOfTime:
            return False
        except Unjudged:
            return True
        self._tally.judged(declaration, case, time.monotonic() - started, verdict)
        if verdict.failure is None:
            self._remember(passed, fingerprint)
            return not self._stopped
        return self._weigh(Suspect(declaration, case, verdict.failure), time.monotonic() - started)

    @staticmethod
    def _remember(passed: set[int], fingerprint: int) -> None:
        if len(passed) >= _MAX_REMEMBERED:  # of a campaign of hours: repetitions of long ago do no harm
            passed.clear()
        passed.add(fingerprint)

    def _weigh(self, suspect: Suspect, seconds: float) -> bool:
        """Pass silently over what is known, put off what another worker is at, and end the round for the rest."""
        self._read_mail()
        if self._stopped:
            return False
        if self._is_known(suspect):
            return self._pass_over(suspect, seconds)
        if self._known.is_busy(suspect.symptom):
            self._deferred.append(suspect)
            return True
        self._suspect = suspect
        return False

    def _pass_over(self, suspect: Suspect, seconds: float) -> bool:
        """Count a known failure, and now and then look whether another bug hides behind it."""
        target = suspect.declaration.target
        deadly = suspect.failure.oracle in _FATAL_ORACLES
        self._tally.known(target, seconds if deadly else 0.0)
        if deadly or self._tally.share_behind_known(target) >= _SHARE_BEHIND_KNOWN:
            return True
        started = time.monotonic()
        self._suspect = self._hidden_behind(suspect)
        self._tally.looked_behind_known(target, time.monotonic() - started)
        return self._suspect is None

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

    def _would_die_again(self, declaration: Declaration, case: Case) -> bool:
        """Whether to skip a case that known findings expect to crash or hang: each costs an executor."""
        deaths = self._known.of_oracles(declaration.target, _FATAL_ORACLES)
        if not deaths or self._tally.share_of_known_deaths(declaration.target) < _SHARE_FOR_KNOWN_DEATHS:
            return False
        found = case_features(declaration, case)
        return any(signature.features <= found for signature in deaths)

    def _look_into_deferred(self) -> None:
        """Take up failures put off while another worker was at their symptom, unless what it found explains them."""
        for _ in range(len(self._deferred)):
            suspect = self._deferred.popleft()
            if self._known.is_busy(suspect.symptom):
                self._deferred.append(suspect)
            elif not self._is_known(suspect) and not self._is_over():
                self._pursue(suspect)

    def _pursue(self, suspect: Suspect) -> None:
        self._findings += 1
        pursuit = Pursuit(
            f"{self._setup.worker}-{self._findings}",
            suspect,
            judge=self._judge,
            known=self._known,
            send=self._channel.send,
            is_over=self._is_over,
            deadline=self._setup.deadline,
        )
        if not pursuit.run():
            self._doubts[suspect.symptom] += 1
