"""What becomes of the failures that a worker meets: known ones pass, others' are put off, the rest is investigated."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import msgspec

from attnfuzz.campaign.aspects import ANY_CASE
from attnfuzz.campaign.counts import ProgressMeter
from attnfuzz.campaign.identity.signature import KnownFindings, Signature, Symptom
from attnfuzz.campaign.judge.judging import CaseJudge
from attnfuzz.campaign.messages import Busy, Known
from attnfuzz.campaign.triage.failing import FailingCase
from attnfuzz.campaign.triage.investigation import Investigation
from attnfuzz.campaign.triage.known_deaths import KnownDeaths
from attnfuzz.oracles.verdict import ends_process

__all__ = ["Failures"]

_MAX_DEFERRED = 64
_MAX_DOUBTS = 3
"""Failures of one symptom that are looked into although none of them ever came back."""


class Failures:
    """The failures of worker ``worker``; ``next`` is the one to be investigated as soon as may be, until ``deadline``.

    ``send`` tells the coordinator; ``is_over`` hears what it says, and whether the campaign has ended.
    """

    def __init__(
        self,
        worker: int,
        *,
        deadline: float,
        judge: CaseJudge,
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
        self._investigated = 0
        self.deaths = KnownDeaths(meter.share_of_known_deaths)
        self.next: FailingCase | None = None

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

    def defer(self, failing: FailingCase) -> None:
        """Put off a failure."""
        self._deferred.append(failing)

    def weigh(self, failing: FailingCase, seconds: float) -> None:
        """Pass silently over what is known, put off what somebody is at already, and take another for the next.

        ``seconds`` is what the failing case took.
        """
        if self._is_known(failing):
            self._count_known(failing, seconds if ends_process(failing.failure) else 0.0)
        elif self.next is not None or self._known.is_busy(failing.symptom):
            self.defer(failing)
        else:
            self.next = failing

    def take_up_deferred(self) -> bool:
        """Whether there is a next one now: one that was put off, and is neither busy nor explained since."""
        for _ in range(len(self._deferred)):
            failing = self._deferred.popleft()
            if self._known.is_busy(failing.symptom):
                self._deferred.append(failing)
            elif self._is_known(failing):
                self._count_known(failing, 0.0)
            else:
                self.next = failing
                return True
        return False

    def investigate(self) -> FailingCase | None:
        """Find out about the next failing case, if there is one; it."""
        failing, self.next = self.next, None
        if failing is None:
            return None
        self._investigated += 1
        investigation = Investigation(
            f"{self._worker}-{self._investigated}",
            failing,
            judge=self._judge,
            known=self._known,
            deaths=self.deaths,
            send=self._send,
            is_over=self._is_over,
            deadline=self._deadline,
        )
        if not investigation.run():
            self._doubts[failing.symptom] += 1
        return failing

    def _is_known(self, failing: FailingCase) -> bool:
        symptom = failing.symptom
        if self._doubts[symptom] >= _MAX_DOUBTS or self._known.may_cause(symptom.kernel, failing.failure):
            return True
        if not self._known.has_symptom(symptom):
            return False
        return self._known.explains(symptom, failing.features)

    def _count_known(self, failing: FailingCase, death_seconds: float) -> None:
        """Count a known failure, also for the finding that explains it: at once, or when its tag is told."""
        target, symptom = failing.declaration.target, failing.symptom
        self._meter.known(target, death_seconds)
        causes = (Symptom.of_cause(target, symptom.oracle, cause) for cause in failing.failure.maybe)
        explaining = [
            *self._known.explaining(symptom, failing.features),
            *(one for cause in causes for one in self._known.explaining(cause, frozenset({ANY_CASE}))),
        ]
        for signature in explaining[:1]:
            if signature in self._findings:
                self._meter.explained(target, self._findings[signature], 1)
            else:
                self._uncounted[signature] += 1
