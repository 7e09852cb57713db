"""Failures that a worker meets: known ones pass, the others wait until they are investigated."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import msgspec

from attnfuzz.campaign.declaration_inference import with_declared
from attnfuzz.campaign.judge.case_judge import CaseJudge, OutOfTime
from attnfuzz.campaign.messages import Busy, Found, Unconfirmed, written
from attnfuzz.campaign.statistics import ProgressMeter
from attnfuzz.campaign.triage.confirmation import retries_of
from attnfuzz.campaign.triage.investigation import Investigation
from attnfuzz.campaign.triage.known_deaths import KnownDeaths
from attnfuzz.identity.bug import Bug, FailingCase, KnownBugs, Symptom
from attnfuzz.oracles.registry import ACCURACY
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import ends_process

_MAX_WAITING = 16
"""Failures of one symptom; the latest are kept."""
_MAX_DOUBTS = 3
"""Failures of one symptom that are looked into although none of them ever came back."""


class FailureQueue:
    """The failures of worker ``worker``, which are investigated until ``deadline``.

    ``send`` tells the coordinator; ``is_over`` hears what it says, and whether the campaign has ended. ``adopting``:
    whether what kernels of the user round on purpose is found out, too.
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
        adopting: bool = False,
    ) -> None:
        self._worker = worker
        self._deadline = deadline
        self._judge = judge
        self._meter = meter
        self._send = send
        self._is_over = is_over
        self._known = KnownBugs()
        self._waiting: dict[Symptom, deque[FailingCase]] = {}
        self._doubts: Counter[Symptom] = Counter()
        self._investigated = 0
        self._adopting = adopting
        self._numerics: dict[str, Numerics] = {}
        self.deaths = KnownDeaths(meter.share_of_known_deaths)

    def learn(self, bug: Bug) -> None:
        """Take what somebody has found for known."""
        self._known.add(bug)
        if not bug.flaky:
            self.deaths.learn(bug)

    def set_busy(self, busy: Busy) -> None:
        """Somebody else begins or ends to look into a symptom."""
        self._known.set_busy(Symptom(busy.kernel, busy.oracle, busy.kind), busy.busy)

    @property
    def is_any_ready(self) -> bool:
        """Whether a failure waits to be looked into, at whose symptom nobody else is."""
        return any(not self._known.is_busy(symptom) for symptom in self._waiting)

    def wait(self, failing: FailingCase) -> None:
        """Have a failure looked into when its turn comes."""
        self._waiting.setdefault(failing.symptom, deque(maxlen=_MAX_WAITING)).append(failing)

    def weigh(self, failing: FailingCase, seconds: float) -> None:
        """Pass silently over what is known, and have anything else wait. ``seconds`` is what the failing case took."""
        if not self._is_passed_over(failing, seconds if ends_process(failing.failure) else 0.0):
            self.wait(failing)

    def take(self) -> FailingCase | None:
        """The next failure to look into: one that is neither busy nor explained since it was put to wait."""
        for symptom in [symptom for symptom in self._waiting if not self._known.is_busy(symptom)]:
            while (failing := self._next_of(symptom)) is not None:
                if self._is_passed_over(failing, 0.0):
                    continue
                if (now := self._as_declared(failing)) is not None:
                    return now
        return None

    def adopted(self, target: str, numerics: Numerics) -> None:
        """Judge the failures of a kernel by these roundings from now on, those that wait, too."""
        self._numerics[target] = numerics

    def _as_declared(self, failing: FailingCase) -> FailingCase | None:
        """The failing case by what is known of its kernel since; None if it is none any more."""
        numerics = self._numerics.get(failing.declaration.target, failing.declaration.numerics)
        if numerics == failing.declaration.numerics:
            return failing
        declared = replace(failing, declaration=with_declared(failing.declaration, Supports(), numerics))
        try:
            if failing.failure.oracle == ACCURACY.name and self._fails(failing) and not self._fails(declared):
                return None
        except OutOfTime:
            pass  # it is told as far as it is known
        return declared

    def _fails(self, failing: FailingCase) -> bool:
        return retries_of(failing, self._judge, self.deaths).alone(failing.case, patience="short") is not None

    def _next_of(self, symptom: Symptom) -> FailingCase | None:
        waiting = self._waiting.get(symptom)
        if not waiting:
            return None
        failing = waiting.popleft()
        if not waiting:
            del self._waiting[symptom]
        return failing

    def investigate(self, failing: FailingCase) -> None:
        """Find out about a failing case."""
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
            adopting=self._adopting and not failing.declaration.is_bundled,
            numerics=self._numerics,
        )
        if not investigation.run():
            self._doubts[failing.symptom] += 1
        if investigation.adopted is not None:
            self.adopted(failing.declaration.target, investigation.adopted)

    def doubt(self, failing: FailingCase) -> None:
        """Tell of a process that was lost while cases ran in it, ``failing`` last; alone none of them loses one."""
        self._investigated += 1
        finding = f"{self._worker}-{self._investigated}"
        fields = written(failing.case, failing.failure, failing.preceding)
        self._send(Found(finding=finding, kernel=failing.declaration.target, **fields))
        self._send(Unconfirmed(finding=finding, runs=1, lost_together=True))

    def _is_passed_over(self, failing: FailingCase, death_seconds: float) -> bool:
        """Whether a bug that is known predicts the failure, or none of its kind ever came back; count it then."""
        target = failing.declaration.target
        bug = self._known.predicting(failing)
        if bug is None and self._doubts[failing.symptom] < _MAX_DOUBTS:
            return False
        self._meter.known(target, death_seconds)
        if bug is not None:
            self._meter.explained(target, bug.finding, 1)
        return True
