"""Runs of one kernel's cases to find out about a failure: alone, or after other cases in one fresh process."""

from __future__ import annotations

from collections.abc import Sequence

from attnfuzz.campaign.judging import Patience, TimedJudge, Unjudged
from attnfuzz.campaign.known_deaths import KnownDeaths
from attnfuzz.campaign.signature import Symptom
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Failure, Relations, ends_process
from attnfuzz.problems.cases import Case

__all__ = ["Trials"]


_OF_WHAT_IS_REMEMBERED: Relations = ("call_sequence",)


class Trials:
    """What runs of a case alone show is told to ``deaths`` as well.

    ``relations`` judge each case that passes otherwise; without any, the oracles that it takes two runs to ask. About
    what a kernel remembers of other calls, only a process that has run nothing before can tell: a plan that has grown
    once is the same from then on.
    """

    def __init__(
        self, judge: TimedJudge, declaration: Declaration, *, deaths: KnownDeaths, relations: Relations = ()
    ) -> None:
        self._judge = judge
        self._declaration = declaration
        self._deaths = deaths
        self.relations = relations

    def alone(self, case: Case, *, patience: Patience = "learned", afresh: bool = False) -> Failure | None:
        """What an oracle objects to; ``afresh`` in a process that has run nothing before. Raises OutOfTime."""
        afresh = afresh or self.relations == _OF_WHAT_IS_REMEMBERED
        failure = self._failure_of(case, patience, afresh=afresh)
        self._deaths.judged(self._declaration, case, failure)
        return failure

    def after(
        self, preceding: Sequence[Case], case: Case, *, patience: Patience = "learned", afresh: bool = False
    ) -> Failure | None:
        """What an oracle objects to in ``case`` once ``preceding`` have run in the same fresh process.

        Without any, the case runs alone, ``afresh`` or not. None also where one of those ends the process. Raises
        OutOfTime.
        """
        if not preceding:
            return self.alone(case, patience=patience, afresh=afresh)
        for i, earlier in enumerate(preceding):
            failure = self._failure_of(earlier, patience, afresh=i == 0)
            if ends_process(failure):
                return None
        return self._failure_of(case, patience, afresh=False)

    def first_alike(self, cases: Sequence[Case], symptom: Symptom) -> tuple[int, Failure] | None:
        """Which of ``cases`` is the first to show ``symptom`` when they run one after the other in a fresh process.

        None if none does, or one ends the process in another way before. Raises OutOfTime.
        """
        for i, case in enumerate(cases):
            failure = self._failure_of(case, "learned", afresh=i == 0)
            if failure is not None and Symptom.of(self._declaration.target, failure) == symptom:
                return i, failure
            if ends_process(failure):
                return None
        return None

    def _failure_of(self, case: Case, patience: Patience, *, afresh: bool) -> Failure | None:
        try:
            verdict = self._judge(self._declaration, case, patience=patience, afresh=afresh, relations=self.relations)
            return verdict.failure
        except Unjudged:
            return None
