"""A saved case run again as it failed: after the cases that it needs, and as often as its rate asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from attnfuzz.corpus import Regression
from attnfuzz.declaration import Declaration
from attnfuzz.execution.runner import Runner
from attnfuzz.oracles.verdict import Verdict
from attnfuzz.problems.cases import Case
from attnfuzz.problems.supported import adapt_options, supports_case

__all__ = ["SavedRun", "judge_sequence", "preceding_for", "run_saved", "runs_to_see"]

_MISSED = 0.05
_MOST_RUNS = 60


@dataclass(frozen=True, slots=True)
class SavedRun:
    """``verdict`` is that of the first of ``runs`` runs that failed, or of the last one; ``failed`` of them failed."""

    verdict: Verdict
    failed: int
    runs: int


def run_saved(regression: Regression, declaration: Declaration, runner: Runner) -> SavedRun:
    """Put the regression to a kernel that supports its case.

    With preceding cases, each run is in a fresh process. A flaky case runs several times.
    Raises what ``Runner.judge`` raises.
    """
    case = adapt_options(regression.case, declaration.options)
    preceding = preceding_for(declaration, regression)
    runs = runs_to_see(regression.finding.failed, regression.finding.runs)
    verdicts = [_once(case, preceding, declaration, runner) for _ in range(runs)]
    failing = [verdict for verdict in verdicts if verdict.failure is not None]
    return SavedRun((failing or verdicts[-1:])[0], len(failing), runs)


def preceding_for(declaration: Declaration, regression: Regression) -> tuple[Case, ...]:
    """The regression's preceding cases as the kernel can run them."""
    adapted = (adapt_options(case, declaration.options) for case in regression.preceding)
    return tuple(case for case in adapted if supports_case(declaration.supports, declaration.options, case))


def runs_to_see(failed: int, runs: int) -> int:
    """How many runs show a failure with this rate with a probability of 95 %; 1 for one that always fails."""
    if not 0 < failed < runs:
        return 1
    return min(_MOST_RUNS, math.ceil(math.log(_MISSED) / math.log(1 - failed / runs)))


def judge_sequence(preceding: Sequence[Case], case: Case, judge: Callable[[Case], Verdict]) -> Verdict:
    """The verdict on ``case`` after ``preceding``; on the first of those that fails if ``case`` does not.

    ``judge`` runs all of them in one process; a case that ends it is the last.
    """
    earlier: Verdict | None = None
    for number, one in enumerate(preceding, start=1):
        verdict = judge(one)
        if verdict.failure is None:
            continue
        where = f"in case {number} of the {len(preceding)} that precede it"
        failure = msgspec.structs.replace(verdict.failure, details=(*verdict.failure.details, where))
        verdict = msgspec.structs.replace(verdict, failure=failure)
        if verdict.fatal or failure.oracle in ("crash", "hang"):
            return verdict
        earlier = earlier or verdict
    last = judge(case)
    return last if last.failure is not None or earlier is None else earlier


def _once(case: Case, preceding: Sequence[Case], declaration: Declaration, runner: Runner) -> Verdict:
    if not preceding:
        return runner.judge(declaration, case)
    with runner.sibling() as fresh:
        return judge_sequence(preceding, case, lambda one: fresh.judge(declaration, one))
