"""A batch took its process down, and none of its cases does so alone: which one is it, after which others?"""

from __future__ import annotations

from collections.abc import Sequence

from attnfuzz.campaign.judging import OutOfTime, TimedJudge, Unjudged
from attnfuzz.campaign.suspect import Suspect
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import ends_process
from attnfuzz.problems.cases import Case

__all__ = ["retrace"]


def retrace(judge: TimedJudge, declaration: Declaration, cases: Sequence[Case]) -> Suspect | None:
    """Run ``cases`` one after the other in a fresh process; the first that crashes or hangs, None if none does."""
    for i, case in enumerate(cases):
        try:
            failure = judge(declaration, case, afresh=i == 0).failure
        except OutOfTime:
            return None
        except Unjudged:
            continue
        if failure is not None and ends_process(failure):
            return Suspect(declaration, case, failure, tuple(cases[:i]))
    return None
