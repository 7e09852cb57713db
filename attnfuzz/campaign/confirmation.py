"""Whether a failure comes back: always, now and then (flaky), only after certain other cases, or never."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from attnfuzz.campaign.known_deaths import LEARNED_ORACLES
from attnfuzz.campaign.preceding import fewer, find_preceding
from attnfuzz.campaign.suspect import Suspect
from attnfuzz.campaign.trials import Trials
from attnfuzz.oracles.verdict import RELATION_ORACLES, Failure, Relations, ends_process
from attnfuzz.problems.cases import Case

__all__ = ["MAX_RUNS", "Confirmation", "confirm", "ever_fails_afresh", "rate_of", "still_fails_afresh"]

MAX_RUNS = 20
"""Runs that a rate is taken from, if there is time for them."""
_RUNS = {"hang": 1, "crash": 2, "guard_page": 2}
_RUNS_FOR_VALUES = 3
_FRESH_RUNS = 4
_LAST_RUNS = 4
_REPEATING_LIMIT_S = 10.0
_SEQUENCE_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Confirmation:
    """``failures`` are those of ``runs`` runs of ``suspect``, after its preceding cases if it needs any."""

    suspect: Suspect
    failures: Sequence[Failure]
    runs: int

    @property
    def is_flaky(self) -> bool:
        """Whether some runs showed something else, or nothing."""
        symptom = self.suspect.symptom
        alike = [one for one in self.failures if self.suspect.as_(self.suspect.case, one).symptom == symptom]
        return len(alike) < self.runs


def confirm(suspect: Suspect, trials: Trials) -> Confirmation:
    """Run the case again, in a fresh process first: the old one may have been damaged by another case.

    A case that does not fail there is repeated, and tried after the cases that it failed after; where bits differed, it
    is asked at last whether other calls do that, and the result's suspect says so. The preceding cases of the result's
    suspect are those that it needs; as a rule none. Raises OutOfTime.
    """
    first = trials.alone(suspect.case, patience="longest", afresh=True) or _in_a_relation(suspect, trials)
    if first is None:
        further = _look_further(suspect, trials)
        return further if further.failures else _between_calls(suspect, trials) or further
    oracle = suspect.failure.oracle
    more = _RUNS.get(oracle, _RUNS_FOR_VALUES) - 1
    failures = [first, *(trials.alone(suspect.case, patience="longest") for _ in range(more))]
    return Confirmation(_alone(suspect), [failure for failure in failures if failure is not None], len(failures))


def _in_a_relation(suspect: Suspect, trials: Trials) -> Failure | None:
    """The death of a case that passes, if it comes in the run of a relation: later trials ask for that one."""
    if suspect.failure.oracle not in LEARNED_ORACLES:
        return None
    usual = trials.relations
    if _death_in(None, suspect, trials) is None:  # not in the one that it draws
        trials.relations = usual
        return None
    found = (_death_in((name,), suspect, trials) for name in RELATION_ORACLES)
    return next(filter(None, found), None) or _death_in(None, suspect, trials)


def _death_in(relations: Relations, suspect: Suspect, trials: Trials) -> Failure | None:
    """What the case dies of in a fresh process where ``relations`` judge it, as they do in later trials."""
    trials.relations = relations
    failure = trials.alone(suspect.case, patience="longest", afresh=True)
    return failure if ends_process(failure) else None


def _between_calls(suspect: Suspect, trials: Trials) -> Confirmation | None:
    """Bits that differ only where other calls came between two runs, if they always do; later trials ask for that.

    In a batch other cases run between the two runs of one, and determinism is the oracle that sees it. A race has shown
    when the case was repeated, so this is asked after that.
    """
    failure = suspect.failure
    if failure.oracle == "call_sequence" or not (failure.oracle == "determinism" or failure.kind == "bits"):
        return None
    usual, trials.relations = trials.relations, ("call_sequence",)
    failures = []
    for _ in range(_RUNS_FOR_VALUES):
        found = trials.alone(suspect.case, patience="longest", afresh=True)
        if found is None or found.oracle != "call_sequence":
            trials.relations = usual
            return None
        failures.append(found)
    return Confirmation(Suspect(suspect.declaration, suspect.case, failures[0]), failures, len(failures))


def rate_of(suspect: Suspect, trials: Trials) -> Confirmation:
    """Run the case up to ``MAX_RUNS`` times. Raises OutOfTime."""
    until = time.monotonic() + _REPEATING_LIMIT_S
    failures: list[Failure | None] = []
    while len(failures) < MAX_RUNS and (not failures or time.monotonic() < until):
        failures.append(_run(suspect, trials, afresh=not failures))
    return Confirmation(suspect, [failure for failure in failures if failure is not None], len(failures))


def still_fails_afresh(suspect: Suspect, trials: Trials) -> bool:
    """Whether the case fails alike in a fresh process, and then in others or the same. Raises OutOfTime.

    A kernel that fails in every second run would pass for one that always does one time in 16 with two runs here,
    and a flaky case that is saved as a certain one passes for whoever replays it.
    """
    for afresh in (True, *(False,) * (_LAST_RUNS - 1)):
        failure = _run(suspect, trials, afresh=afresh)
        if failure is None or suspect.as_(suspect.case, failure).symptom != suspect.symptom:
            return False
    return True


def ever_fails_afresh(suspect: Suspect, trials: Trials) -> bool:
    """Whether the case fails in any of a few fresh processes. Raises OutOfTime."""
    return any(_run(suspect, trials, afresh=True) is not None for _ in range(_FRESH_RUNS))


def _run(suspect: Suspect, trials: Trials, *, afresh: bool) -> Failure | None:
    if suspect.preceding:
        return trials.after(suspect.preceding, suspect.case)
    return trials.alone(suspect.case, afresh=afresh)


def _look_further(suspect: Suspect, trials: Trials) -> Confirmation:
    """The case passes in a fresh process: does it fail when repeated, or after others?"""
    repeats, failure = _repeat(suspect, trials)
    histories = [(suspect.case,) * (repeats - 1)] if failure is not None else []
    histories += [suspect.preceding] if suspect.preceding else []
    found = find_preceding(suspect, histories, trials)
    if found is None:
        return Confirmation(_alone(suspect), [failure] if failure is not None else [], repeats)

    kept = _only_needed(found, trials)
    return Confirmation(kept, [kept.failure] * 2, 2)


def _only_needed(suspect: Suspect, trials: Trials) -> Suspect:
    def fails(preceding: Sequence[Case]) -> bool:
        failure = trials.after(preceding, suspect.case)
        return failure is not None and suspect.as_(suspect.case, failure).symptom == suspect.symptom

    kept = fewer(suspect.preceding, fails, until=time.monotonic() + _SEQUENCE_LIMIT_S)
    return Suspect(suspect.declaration, suspect.case, suspect.failure, kept)


def _repeat(suspect: Suspect, trials: Trials) -> tuple[int, Failure | None]:
    """How many runs there have been when it failed again, or in all."""
    runs, until = 1, time.monotonic() + _REPEATING_LIMIT_S
    if suspect.failure.oracle == "hang":  # a slow machine is likelier than a kernel that hangs now and then
        return runs, None
    while runs < MAX_RUNS and time.monotonic() < until:
        runs += 1
        failure = trials.alone(suspect.case)
        if failure is not None:
            return runs, failure
    return runs, None


def _alone(suspect: Suspect) -> Suspect:
    return Suspect(suspect.declaration, suspect.case, suspect.failure)
