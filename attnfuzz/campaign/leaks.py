"""Failures that are leaks: one call does no harm, and the process dies of the last of many."""

from __future__ import annotations

from collections.abc import Sequence

from attnfuzz.campaign.judging import Patience, TimedJudge, Unjudged
from attnfuzz.campaign.known_deaths import KnownDeaths
from attnfuzz.campaign.suspect import Suspect
from attnfuzz.campaign.trials import Trials
from attnfuzz.declaration import Declaration
from attnfuzz.judging.leaks import LEAK
from attnfuzz.oracles.verdict import RELATION_ORACLES, Failure
from attnfuzz.problems.cases import Case

__all__ = ["LeakTrials", "leak_behind", "may_be_leak", "trials_of"]

_OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError")


class LeakTrials(Trials):
    """Each trial calls the kernel many times on one case, in a process of its own: nothing that ran before matters."""

    def __init__(self, judge: TimedJudge, declaration: Declaration) -> None:
        super().__init__(judge, declaration, deaths=KnownDeaths())  # no case of a leak is deadly
        self._find_leak = judge.find_leak

    def alone(self, case: Case, *, patience: Patience = "learned", afresh: bool = False) -> Failure | None:
        """What there is to say of a kernel that leaks on ``case``. Raises OutOfTime."""
        return self._find_leak(self._declaration, case)

    def after(
        self, preceding: Sequence[Case], case: Case, *, patience: Patience = "learned", afresh: bool = False
    ) -> Failure | None:
        """As `alone`: a leak needs no other cases."""
        return self.alone(case)


def trials_of(suspect: Suspect, judge: TimedJudge, deaths: KnownDeaths) -> Trials:
    """How to run cases in order to see the suspect's failure again."""
    if suspect.failure.kind == LEAK:
        return LeakTrials(judge, suspect.declaration)
    oracle = suspect.failure.oracle
    return Trials(judge, suspect.declaration, deaths=deaths, relations=(oracle,) if oracle in RELATION_ORACLES else ())


def may_be_leak(failure: Failure) -> bool:
    """Whether the process, or what the kernel may have of the GPU, ran out of memory."""
    if failure.oracle == "crash":
        return failure.kind == "memory"
    return failure.oracle == "exception" and failure.kind.split(" ")[0] in _OUT_OF_MEMORY


def leak_behind(suspect: Suspect, judge: TimedJudge) -> Suspect | None:
    """The leak that the suspect's death may have come of; None if the kernel does not leak. Raises OutOfTime."""
    if not may_be_leak(suspect.failure):
        return None
    try:
        failure = judge.find_leak(suspect.declaration, suspect.case)
    except Unjudged:
        return None
    return None if failure is None else Suspect(suspect.declaration, suspect.case, failure)
