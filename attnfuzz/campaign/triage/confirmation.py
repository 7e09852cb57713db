"""Whether a failure comes back: always, now and then (flaky), only after certain other cases, or never.

Retries run one kernel's cases alone, or after other cases in one fresh process. Of the cases that a failure needs
before it, as few are kept as can be found with so many runs, each as like the failing one as can be.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnfuzz.campaign.judge.case_judge import CaseJudge, OutOfTime, Patience, Unjudged
from attnfuzz.campaign.triage.known_deaths import KnownDeaths
from attnfuzz.cases.supported import supports_case
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import FailingCase, Symptom, is_leak, may_be_leak
from attnfuzz.identity.differences import differing, others_like, with_fields_of
from attnfuzz.mistake import READ_BEFORE_WRITTEN
from attnfuzz.oracles.registry import CALL_SEQUENCE, DETERMINISM, HANG, KNOWN, oracle_of
from attnfuzz.problems.cases import Case
from attnfuzz.verdict import Failure, Relations, ends_process

_OF_WHAT_IS_REMEMBERED: Relations = (CALL_SEQUENCE.name,)


class Retries:
    """Runs a case again; ``deaths`` is told what runs of a case alone show.

    ``relations`` judge each case that passes otherwise; without any, the oracles that it takes two runs to ask. About
    what a kernel remembers of other calls, only a process that has run nothing before can tell: a plan that has grown
    once is the same from then on.
    """

    def __init__(
        self, judge: CaseJudge, declaration: Declaration, *, deaths: KnownDeaths, relations: Relations = ()
    ) -> None:
        self._judge = judge
        self._declaration = declaration
        self._deaths = deaths
        self.relations = relations

    def alone(
        self, case: Case, *, patience: Patience = "learned", afresh: bool = False, relations: Relations = ()
    ) -> Failure | None:
        """The oracle's objection to the case; ``afresh`` in a process that has run nothing before. Raises OutOfTime.

        ``relations``, if there are any, in place of those that judge as a rule.
        """
        relations = relations or self.relations
        afresh = afresh or relations == _OF_WHAT_IS_REMEMBERED
        failure = self._failure_of(case, patience, afresh=afresh, relations=relations)
        self._deaths.judged(self._declaration, case, failure)
        return failure

    def after(
        self, preceding: Sequence[Case], case: Case, *, patience: Patience = "learned", afresh: bool = False
    ) -> Failure | None:
        """The oracle's objection to ``case`` once ``preceding`` have run in the same fresh process.

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

    def _failure_of(self, case: Case, patience: Patience, *, afresh: bool, relations: Relations = ()) -> Failure | None:
        relations = relations or self.relations
        try:
            verdict = self._judge(self._declaration, case, patience=patience, afresh=afresh, relations=relations)
            return verdict.failure
        except Unjudged:
            return None


class LeakRetries(Retries):
    """Each trial calls the kernel many times on one case, in a process of its own: nothing that ran before matters."""

    def __init__(self, judge: CaseJudge, declaration: Declaration) -> None:
        super().__init__(judge, declaration, deaths=KnownDeaths())  # no case of a leak is deadly
        self._find_leak = judge.find_leak

    def alone(
        self, case: Case, *, patience: Patience = "learned", afresh: bool = False, relations: Relations = ()
    ) -> Failure | None:
        """The failure of a kernel that leaks on ``case``. Raises OutOfTime."""
        return self._find_leak(self._declaration, case)

    def after(
        self, preceding: Sequence[Case], case: Case, *, patience: Patience = "learned", afresh: bool = False
    ) -> Failure | None:
        """As `alone`: a leak needs no other cases."""
        return self.alone(case)


def retries_of(failing: FailingCase, judge: CaseJudge, deaths: KnownDeaths) -> Retries:
    """How to run cases in order to see the failing case's failure again."""
    if is_leak(failing.failure):
        return LeakRetries(judge, failing.declaration)
    relations = oracle_of(failing.failure.oracle).relations
    return Retries(judge, failing.declaration, deaths=deaths, relations=relations)


def leak_behind(failing: FailingCase, judge: CaseJudge) -> FailingCase | None:
    """The leak that the failing case's death may have come of; None if the kernel does not leak. Raises OutOfTime."""
    if not may_be_leak(failing.failure):
        return None
    try:
        failure = judge.find_leak(failing.declaration, failing.case)
    except Unjudged:
        return None
    return None if failure is None else FailingCase(failing.declaration, failing.case, failure)


def first_death(judge: CaseJudge, declaration: Declaration, cases: Sequence[Case]) -> FailingCase | None:
    """Run ``cases`` one after the other in a fresh process; the first that crashes or hangs, None if none does."""
    for i, case in enumerate(cases):
        try:
            failure = judge(declaration, case, afresh=i == 0).failure
        except OutOfTime:
            return None
        except Unjudged:
            continue
        if failure is not None and ends_process(failure):
            return FailingCase(declaration, case, failure, tuple(cases[:i]))
    return None


Fails = Callable[[Sequence[Case]], bool]
"""Whether the failure is still there after these cases."""
_VERIFICATIONS = 3
_HANG_GUARD_S = 300.0


def find_preceding(failing: FailingCase, histories: Sequence[Sequence[Case]], retries: Retries) -> FailingCase | None:
    """The failing case, or an earlier case of a history that fails like it, with the cases that have to run before.

    Each of ``histories`` is tried in a fresh process, in which the case alone does not fail. What it shows counts if it
    shows again, in the same place; otherwise the kernel is flaky. Raises OutOfTime.
    """
    for history in histories:
        cases = (*history, failing.case)
        seen = retries.first_alike(cases, failing.symptom)
        if seen is None or seen[0] == 0:
            continue
        place, failure = seen
        again = [retries.first_alike(cases[: place + 1], failing.symptom) for _ in range(_VERIFICATIONS)]
        alone = [retries.alone(cases[place], afresh=True) for _ in range(_VERIFICATIONS)]
        if any(alone) or not all(one is not None and one[0] == place for one in again):
            continue
        return FailingCase(failing.declaration, cases[place], failure, cases[:place])
    return None


class Allowance:
    """So many runs of cases, whatever they take: a machine that has much to do is not to tell less, or other things.

    Only what hangs ends it by the clock.
    """

    def __init__(self, runs: int) -> None:
        self._left = runs
        self._until = time.monotonic() + _HANG_GUARD_S

    def take(self, runs: int = 1) -> bool:
        """Whether so many more may be made; they count then."""
        if self._left < runs or time.monotonic() >= self._until:
            return False
        self._left -= runs
        return True

    def limited(self, fails: Fails) -> Fails:
        """``fails``, and False once there are no more runs."""
        return lambda preceding: self.take(len(preceding) + 1) and fails(preceding)


def fewer(preceding: Sequence[Case], fails: Fails) -> tuple[Case, ...]:
    """As few of ``preceding`` as are needed: the last 1, 2, 4 ..., then without halves, quarters, single ones."""
    kept = tuple(preceding)

    def still_fails(cases: Sequence[Case]) -> bool:
        return bool(cases) and fails(cases)

    last = 1
    while last < len(kept):
        if still_fails(kept[-last:]):
            kept = kept[-last:]
            break
        last *= 2
    chunk = len(kept) // 2
    while chunk:
        start = 0
        while start < len(kept):
            rest = kept[:start] + kept[start + chunk :]
            if still_fails(rest):
                kept = rest
            else:
                start += chunk
        chunk //= 2
    return kept


def more_alike(failing: FailingCase, fails: Fails) -> tuple[Case, ...]:
    """The failing case's preceding cases, each as like the case itself as it can be.

    In what they still differ is what the kernel confuses: what it keeps of one call and uses in the next.
    """
    case, kept = failing.case, failing.preceding
    if all(one == case for one in kept) or fails((case,) * len(kept)):
        return (case,) * len(kept)
    for i in range(len(kept) - 1, -1, -1):
        kept = _with_more_alike(kept, i, failing, fails)
    return kept


def _with_more_alike(preceding: tuple[Case, ...], i: int, failing: FailingCase, fails: Fails) -> tuple[Case, ...]:
    declaration, case, now = failing.declaration, failing.case, preceding[i]

    def fails_with(one: Case) -> bool:
        return supports_case(declaration.supports, declaration.options, one) and fails(
            (*preceding[:i], one, *preceding[i + 1 :])
        )

    paths = differing(case, now)
    nearly = [one for path in paths if (one := with_fields_of(case, now, [path])) is not None]
    if (alike := next(filter(fails_with, [case, *nearly]), None)) is not None:
        return (*preceding[:i], alike, *preceding[i + 1 :])
    for path in paths:
        closer = with_fields_of(now, case, [path])
        if closer is not None and closer != now and fails_with(closer):
            now = closer
    return (*preceding[:i], now, *preceding[i + 1 :])


MAX_RUNS = 20
"""Runs that a rate is taken from, if there is time for them."""
_FRESH_RUNS = 4
_LAST_RUNS = 4
_SEQUENCE_RUNS = 400
"""Most cases that are run to find out which earlier ones a case needs."""
_MOST_LIKE_IT = 12
"""Calls that differ from a failing one in one respect, which are made before it."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """``failures`` are those of ``runs`` runs of ``failing``, after its preceding cases if it needs any."""

    failing: FailingCase
    failures: Sequence[Failure]
    runs: int

    @property
    def is_flaky(self) -> bool:
        """Whether some runs showed something else, or nothing."""
        symptom = self.failing.symptom
        alike = [one for one in self.failures if self.failing.with_case(self.failing.case, one).symptom == symptom]
        return len(alike) < self.runs


def confirm(failing: FailingCase, retries: Retries) -> Confirmation:
    """Run the case again, in a fresh process first: the old one may have been damaged by another case.

    A case that does not fail there is repeated, and tried after the cases that it failed after; where bits differed, it
    is asked at last whether other calls do that, and the result's failing case says so. What earlier calls have left in
    memory that the kernel does not write shows as anything: it is told as that memory, which a fresh process has not
    been through. The preceding cases of that are those that it needs; as a rule none. Raises OutOfTime.
    """
    first = retries.alone(failing.case, patience="longest", afresh=True) or _in_a_relation(failing, retries)
    if first is None:
        further = _look_further(failing, retries)
        return further if further.failures else _between_calls(failing, retries) or further
    seen = failing.failure
    of_memory = first.cause == READ_BEFORE_WRITTEN and seen.cause != first.cause and not ends_process(seen)
    if of_memory:
        failing = failing.with_case(failing.case, first)
    more = oracle_of(failing.failure.oracle).confirming_runs - 1
    failures = [first, *(retries.alone(failing.case, patience="longest", afresh=of_memory) for _ in range(more))]
    return Confirmation(_alone(failing), [failure for failure in failures if failure is not None], len(failures))


def _in_a_relation(failing: FailingCase, retries: Retries) -> Failure | None:
    """The death of a case that passes, if it comes in the run of a relation: later retries ask for that one."""
    if not oracle_of(failing.failure.oracle).ends_process:
        return None
    usual = retries.relations
    if _death_in(None, failing, retries) is None:  # not in the one that it draws
        retries.relations = usual
        return None
    found = (_death_in((name,), failing, retries) for name, one in KNOWN.items() if one.is_relation)
    return next(filter(None, found), None) or _death_in(None, failing, retries)


def _death_in(relations: Relations, failing: FailingCase, retries: Retries) -> Failure | None:
    """The failure with which the case ends a fresh process where ``relations`` judge it, as later retries do."""
    retries.relations = relations
    failure = retries.alone(failing.case, patience="longest", afresh=True)
    return failure if ends_process(failure) else None


def _between_calls(failing: FailingCase, retries: Retries) -> Confirmation | None:
    """Bits that differ only where other calls came between two runs, if they always do; later retries ask for that.

    In a batch other cases run between the two runs of one, and determinism is the oracle that sees it. A race has shown
    when the case was repeated, so this is asked after that.
    """
    failure = failing.failure
    if failure.oracle == CALL_SEQUENCE.name or not (failure.oracle == DETERMINISM.name or failing.symptom.is_of_bits):
        return None
    usual, retries.relations = retries.relations, (CALL_SEQUENCE.name,)
    failures = []
    for _ in range(CALL_SEQUENCE.confirming_runs):
        found = retries.alone(failing.case, patience="longest", afresh=True)
        if found is None or found.oracle != CALL_SEQUENCE.name:
            retries.relations = usual
            return None
        failures.append(found)
    return Confirmation(FailingCase(failing.declaration, failing.case, failures[0]), failures, len(failures))


def rate_of(failing: FailingCase, retries: Retries) -> Confirmation:
    """Run the case up to ``MAX_RUNS`` times. Raises OutOfTime."""
    allowance = Allowance(MAX_RUNS)
    failures: list[Failure | None] = []
    while allowance.take():
        failures.append(_run(failing, retries, afresh=not failures))
    return Confirmation(failing, [failure for failure in failures if failure is not None], len(failures))


def still_fails_afresh(failing: FailingCase, retries: Retries) -> bool:
    """Whether the case fails alike in a fresh process, and then in others or the same. Raises OutOfTime.

    A kernel that fails in every second run would pass for one that always does one time in 16 with two runs here,
    and a flaky case that is saved as a certain one passes for whoever replays it.
    """
    for afresh in (True, *(False,) * (_LAST_RUNS - 1)):
        failure = _run(failing, retries, afresh=afresh)
        if failure is None or failing.with_case(failing.case, failure).symptom != failing.symptom:
            return False
    return True


def ever_fails_afresh(failing: FailingCase, retries: Retries) -> bool:
    """Whether the case fails in any of a few fresh processes. Raises OutOfTime."""
    return any(_run(failing, retries, afresh=True) is not None for _ in range(_FRESH_RUNS))


def _run(failing: FailingCase, retries: Retries, *, afresh: bool) -> Failure | None:
    if failing.preceding:
        return retries.after(failing.preceding, failing.case)
    return retries.alone(failing.case, afresh=afresh)


def _look_further(failing: FailingCase, retries: Retries) -> Confirmation:
    """The case passes in a fresh process: does it fail after a call that is like it, when repeated, or after others?"""
    if (after := _after_one_like_it(failing, retries)) is not None:
        return Confirmation(after, [after.failure] * 2, 2)
    repeats, failure = _repeat(failing, retries)
    histories = [(failing.case,) * (repeats - 1)] if failure is not None else []
    histories += [failing.preceding] if failing.preceding else []
    found = find_preceding(failing, histories, retries)
    if found is None:
        return Confirmation(_alone(failing), [failure] if failure is not None else [], repeats)

    kept = _only_needed(found, retries)
    return Confirmation(kept, [kept.failure] * 2, 2)


def _after_one_like_it(failing: FailingCase, retries: Retries) -> FailingCase | None:
    """The case after one that differs from it in a single respect, or in none, if it always fails then.

    That is not asked of what was seen in the first case that a process ran.
    """
    declaration, case = failing.declaration, failing.case
    if not failing.preceding or ends_process(failing.failure):
        return None
    others = others_like(case, supports=declaration.supports, options=declaration.options)
    for one in (case, *itertools.islice(others, _MOST_LIKE_IT)):
        seen = retries.after((one,), case, afresh=True)
        if seen is None or failing.with_case(case, seen).symptom.sort != failing.symptom.sort:
            continue
        found = FailingCase(declaration, case, seen, (one,))
        again = [retries.after((one,), case, afresh=True) for _ in range(_VERIFICATIONS - 1)]
        alone = [retries.alone(case, afresh=True) for _ in range(_VERIFICATIONS)]
        if not any(alone) and all(
            other is not None and found.with_case(case, other).symptom == found.symptom for other in again
        ):
            return found
    return None


def _only_needed(failing: FailingCase, retries: Retries) -> FailingCase:
    def fails(preceding: Sequence[Case]) -> bool:
        failure = retries.after(preceding, failing.case)
        return failure is not None and failing.with_case(failing.case, failure).symptom == failing.symptom

    kept = fewer(failing.preceding, Allowance(_SEQUENCE_RUNS).limited(fails))
    return FailingCase(failing.declaration, failing.case, failing.failure, kept)


def _repeat(failing: FailingCase, retries: Retries) -> tuple[int, Failure | None]:
    """How many runs there have been when it failed again, or in all."""
    runs, allowance = 1, Allowance(MAX_RUNS - 1)
    if failing.failure.oracle == HANG.name:  # a slow machine is likelier than a kernel that hangs now and then
        return runs, None
    while allowance.take():
        runs += 1
        failure = retries.alone(failing.case)
        if failure is not None:
            return runs, failure
    return runs, None


def _alone(failing: FailingCase) -> FailingCase:
    return FailingCase(failing.declaration, failing.case, failing.failure)
