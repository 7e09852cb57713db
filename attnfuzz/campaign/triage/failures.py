"""What becomes of the failures that a worker meets: known ones pass, others' are put off, the rest is pursued."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from attnfuzz.campaign.aspects import ANY_CASE
from attnfuzz.campaign.counts import ProgressMeter
from attnfuzz.campaign.identity.signature import KnownFindings, Signature, Symptom
from attnfuzz.campaign.judge.judging import OutOfTime, TimedJudge, Unjudged
from attnfuzz.campaign.messages import Busy, Known
from attnfuzz.campaign.relatives import relatives_beyond
from attnfuzz.campaign.triage.failing import FailingCase
from attnfuzz.campaign.triage.investigation import Investigation
from attnfuzz.campaign.triage.known_deaths import KnownDeaths
from attnfuzz.oracles.verdict import ends_process

__all__ = ["Failures"]

_SHARE_BEHIND_KNOWN = 0.15
"""Part of a kernel's time that may go into looking for bugs that hide behind known ones."""


_RELATIVES_TRIED = 4


_MAX_DEFERRED = 64


_MAX_DOUBTS = 3
"""Failures of one symptom that are looked into although none of them ever came back."""


class Failures:
    """The failures of worker ``worker``, one of which may be the suspect: the next to be pursued, until ``deadline``.

    ``send`` tells the coordinator; ``is_over`` hears what it says, and whether the campaign has ended.
    """

    def __init__(
        self,
        worker: int,
        *,
        deadline: float,
        judge: TimedJudge,
        meter: ProgressMeter,
        send: Callable[[msgspec.Struct], None],
        is_over: Callable[[], bool],
    ) -> None:
        self._worker = worker
        self._deadline = deadline
        self._judge = judge
        self._meter = meter
        self._send = send
        self._is_over = is_over
        self._known = KnownFindings()
        self._findings: dict[Signature, str] = {}
        self._uncounted: Counter[Signature] = Counter()
        self._deferred: deque[FailingCase] = deque(maxlen=_MAX_DEFERRED)
        self._doubts: Counter[Symptom] = Counter()
        self._pursued = 0
        self.deaths = KnownDeaths(meter.share_of_known_deaths)
        self.suspect: FailingCase | None = None

    def learn(self, known: Known) -> None:
        """Take what somebody has found for known."""
        signature = Signature(Symptom(known.kernel, known.oracle, known.kind), known.features)
        self._known.add(signature, flaky=known.flaky)
        if not known.flaky:
            self.deaths.learn(signature)
        finding = self._findings.setdefault(signature, known.finding)
        if uncounted := self._uncounted.pop(signature, 0):
            self._meter.explained(known.kernel, finding, uncounted)

    def set_busy(self, busy: Busy) -> None:
        """Somebody else begins or ends to look into a symptom."""
        self._known.set_busy(Symptom(busy.kernel, busy.oracle, busy.kind), busy.busy)

    def defer(self, suspect: FailingCase) -> None:
        """Put off a failure."""
        self._deferred.append(suspect)

    def weigh(self, suspect: FailingCase, seconds: float) -> None:
        """Pass silently over what is known, put off what somebody is at already, and take the rest for the suspect.

        ``seconds`` is what the failing case took.
        """
        if self._is_known(suspect):
            self._pass_over(suspect, seconds)
        elif self.suspect is not None or self._known.is_busy(suspect.symptom):
            self.defer(suspect)
        else:
            self.suspect = suspect

    def take_up_deferred(self) -> bool:
        """Whether there is a suspect now: one that was put off, and is neither busy nor explained by what was found."""
        for _ in range(len(self._deferred)):
            suspect = self._deferred.popleft()
            if self._known.is_busy(suspect.symptom):
                self._deferred.append(suspect)
            elif self._is_known(suspect):
                self._count_known(suspect, 0.0)
            else:
                self.suspect = suspect
                return True
        return False

    def investigate(self, suspect: FailingCase) -> None:
        """Find out about ``suspect``."""
        self._pursued += 1
        pursuit = Investigation(
            f"{self._worker}-{self._pursued}",
            suspect,
            judge=self._judge,
            known=self._known,
            deaths=self.deaths,
            send=self._send,
            is_over=self._is_over,
            deadline=self._deadline,
        )
        if not pursuit.run():
            self._doubts[suspect.symptom] += 1

    def _is_known(self, suspect: FailingCase) -> bool:
        symptom = suspect.symptom
        if self._doubts[symptom] >= _MAX_DOUBTS or self._known.may_cause(symptom.kernel, suspect.failure):
            return True
        if not self._known.has_symptom(symptom):
            return False
        return self._known.explains(symptom, suspect.features)

    def _pass_over(self, suspect: FailingCase, seconds: float) -> None:
        """Count a known failure, and now and then look whether another bug hides behind it."""
        target = suspect.declaration.target
        deadly = ends_process(suspect.failure)
        self._count_known(suspect, seconds if deadly else 0.0)
        if deadly or self.suspect is not None or self._meter.share_behind_known(target) >= _SHARE_BEHIND_KNOWN:
            return
        started = time.monotonic()
        self.suspect = self._hidden_behind(suspect)
        self._meter.looked_behind_known(target, time.monotonic() - started)

    def _count_known(self, suspect: FailingCase, death_seconds: float) -> None:
        """Count a known failure, also for the finding that explains it: at once, or when its tag is told."""
        target, symptom = suspect.declaration.target, suspect.symptom
        self._meter.known(target, death_seconds)
        causes = (Symptom.of_cause(target, symptom.oracle, cause) for cause in suspect.failure.maybe)
        explaining = [
            *self._known.explaining(symptom, suspect.features),
            *(one for cause in causes for one in self._known.explaining(cause, frozenset({ANY_CASE}))),
        ]
        for signature in explaining[:1]:
            if signature in self._findings:
                self._meter.explained(target, self._findings[signature], 1)
            else:
                self._uncounted[signature] += 1

    def _hidden_behind(self, suspect: FailingCase) -> FailingCase | None:
        for case in relatives_beyond(self._known, suspect)[:_RELATIVES_TRIED]:
            try:
                failure = self._judge(suspect.declaration, case).failure
            except (OutOfTime, Unjudged):
                return None
            if failure is not None and not self._is_known(found := FailingCase(suspect.declaration, case, failure)):
                return None if self._known.is_busy(found.symptom) else found
        return None
