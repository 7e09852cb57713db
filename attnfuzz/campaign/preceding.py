"""Failures that need other cases before them: which of those, and as few and small as can be found in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from attnfuzz.campaign.suspect import Suspect
from attnfuzz.campaign.trials import Trials
from attnfuzz.minimise import minimise
from attnfuzz.problems.cases import Case
from attnfuzz.problems.simplest import simplest_case

__all__ = ["fewer", "find_preceding", "simpler"]

Fails = Callable[[Sequence[Case]], bool]
"""Whether the failure is still there after these cases."""

_VERIFICATIONS = 3
_MAX_CALLS_PER_CASE = 40


def find_preceding(suspect: Suspect, histories: Sequence[Sequence[Case]], trials: Trials) -> Suspect | None:
    """The suspect, or an earlier case of a history that fails like it, with the cases that have to run before.

    Each of ``histories`` is tried in a fresh process, in which the suspect alone does not fail. What it shows counts if
    it shows again, in the same place; otherwise the kernel is flaky. Raises OutOfTime.
    """
    for history in histories:
        cases = (*history, suspect.case)
        seen = trials.first_alike(cases, suspect.symptom)
        if seen is None or seen[0] == 0:
            continue
        place, failure = seen
        again = [trials.first_alike(cases[: place + 1], suspect.symptom) for _ in range(_VERIFICATIONS)]
        alone = [trials.alone(cases[place], afresh=True) for _ in range(_VERIFICATIONS)]
        if any(alone) or not all(one is not None and one[0] == place for one in again):
            continue
        return Suspect(suspect.declaration, cases[place], failure, cases[:place])
    return None


def fewer(preceding: Sequence[Case], fails: Fails, *, until: float) -> tuple[Case, ...]:
    """As few of ``preceding`` as are needed: the last 1, 2, 4 ..., then without halves, quarters, single ones.

    ``until`` on the monotonic clock nothing more is tried.
    """
    kept = tuple(preceding)

    def still_fails(cases: Sequence[Case]) -> bool:
        return bool(cases) and time.monotonic() < until and fails(cases)

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


def simpler(suspect: Suspect, fails: Fails, *, until: float) -> tuple[Case, ...]:
    """The suspect's preceding cases, each as simple as it can be."""
    declaration = suspect.declaration
    supports, options = declaration.supports, declaration.options
    kept = suspect.preceding
    for uniform in (simplest_case(suspect.case.problem, supports, options), suspect.case):
        if time.monotonic() < until and fails((uniform,) * len(kept)):
            return (uniform,) * len(kept)
    for i in range(len(kept)):
        kept = _with_simpler(kept, i, suspect, fails, until=until)
    return kept


def _with_simpler(
    preceding: tuple[Case, ...], i: int, suspect: Suspect, fails: Fails, *, until: float
) -> tuple[Case, ...]:
    before, after = preceding[:i], preceding[i + 1 :]
    smallest = minimise(
        preceding[i],
        lambda case: fails((*before, case, *after)),
        supports=suspect.declaration.supports,
        options=suspect.declaration.options,
        deadline=until,
        max_calls=_MAX_CALLS_PER_CASE,
    )
    return (*before, smallest, *after)
