"""A saved case run again as it failed: after the cases that it needs, and as often as its rate asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from attnfuzz.campaign.memory_limit import memory_limit
from attnfuzz.corpus import Regression
from attnfuzz.declaration import Declaration
from attnfuzz.judging.guard_naming import with_name
from attnfuzz.judging.leaks import LEAK
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.verdict import RELATION_ORACLES, Relations, Verdict, ends_process
from attnfuzz.problems.cases import Case
from attnfuzz.problems.supported import adapt_options, supports_case

__all__ = ["SavedRun", "judge_sequence", "preceding_for", "relations_for", "run_saved", "runs_to_see"]

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

    With preceding cases, each run is in a fresh process, and so it is where the finding is about other calls. A flaky
    case runs several times, and one of a kernel that leaked so often that it shows. What passes otherwise is judged by
    relations: see ``relations_for``.
    Where a process outgrew its memory, there is a limit to it again.
    Raises what ``Runner.judge`` raises.
    """
    case = adapt_options(regression.case, declaration.options)
    preceding = preceding_for(declaration, regression)
    runs = runs_to_see(regression.finding.failed, regression.finding.runs)
    with _limited(regression, runner) as limited:
        once = _leak_first if regression.finding.kind == LEAK else _once
        verdicts = [once(case, preceding, declaration, limited, relations_for(regression)) for _ in range(runs)]
    failing = [verdict for verdict in verdicts if verdict.failure is not None]
    verdict = (failing or verdicts[-1:])[0]
    if not preceding:
        verdict = with_name(runner, declaration, case, verdict)
    return SavedRun(verdict, len(failing), runs)


def preceding_for(declaration: Declaration, regression: Regression) -> tuple[Case, ...]:
    """The regression's preceding cases as the kernel can run them."""
    adapted = (adapt_options(case, declaration.options) for case in regression.preceding)
    return tuple(case for case in adapted if supports_case(declaration.supports, declaration.options, case))


def relations_for(regression: Regression) -> Relations:
    """The relation that the finding is of, or all; none for a hang, and where certain cases and no others go before."""
    oracle = regression.finding.oracle
    if oracle in RELATION_ORACLES:
        return (oracle,)
    return () if regression.preceding or oracle == "hang" else "all"


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
        if verdict.fatal or ends_process(failure):
            return verdict
        earlier = earlier or verdict
    last = judge(case)
    return last if last.failure is not None or earlier is None else earlier


def _once(
    case: Case, preceding: Sequence[Case], declaration: Declaration, runner: Runner, relations: Relations
) -> Verdict:
    if not preceding and relations != ("call_sequence",):
        return runner.judge(declaration, case, relations=relations)

    def judge(one: Case) -> Verdict:
        return fresh.judge(declaration, one, relations=relations if one is case else ())

    with runner.sibling() as fresh:
        return judge_sequence(preceding, case, judge)


def _leak_first(
    case: Case, preceding: Sequence[Case], declaration: Declaration, runner: Runner, relations: Relations
) -> Verdict:
    """A kernel that does not leak any more may still fail in another way."""
    failure = runner.find_leak(declaration, case)
    return _once(case, preceding, declaration, runner, relations) if failure is None else Verdict(failure=failure)


@contextmanager
def _limited(regression: Regression, runner: Runner) -> Iterator[Runner]:
    """``runner``, or for a death of memory one whose executors have as much of it as those of a campaign."""
    if (regression.finding.oracle, regression.finding.kind) != ("crash", "memory"):
        yield runner
        return
    limit = memory_limit(runner.resident_bytes, device=runner.device, workers=1)
    with runner.sibling(memory_limit_bytes=limit) as limited:
        yield limited
