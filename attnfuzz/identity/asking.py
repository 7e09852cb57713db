"""Runs cases near a failing one where no cause decides: which bug is it, and what does it need?

If a relative fails without what a known bug needs, another bug is at work; if none does, it is that bug, by whatever
oracle it shows. If what the bug needs makes the case pass, both are about the same place: a kernel that stores the
output with the strides of q is right where both lie alike. Shrinking cannot tell, since it only ever goes to simpler
cases. How many runs a question may take is limited by their number: a machine that has much to do tells no other bugs
than one that has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from attnfuzz.cases.facets.storage import KV_STRIDES_DIFFER, SHARED_PAGES
from attnfuzz.cases.supported import supports_case
from attnfuzz.explaining.ablation import changes_of
from attnfuzz.identity.bug import Bug, FailingCase, KnownBugs
from attnfuzz.identity.differences import differing, with_fields_of
from attnfuzz.identity.features import case_features, kernel_parts, needs_numbers, widened
from attnfuzz.identity.nearby_cases import (
    alternatives,
    crossed,
    simpler_beside,
    simpler_in_one_respect,
    strides_swapped,
    with_numbers_moved,
    without,
)
from attnfuzz.oracles.registry import KNOWN, OracleName, oracle_of
from attnfuzz.problems.cases import AttentionCase, Case, decode_case
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.repeated import plain_values

_MOST_RUNS = 24
"""Of one question. On a GPU each may have to be compiled, and the next bug waits."""
Run = Callable[[Case, tuple[OracleName, ...]], FailingCase | None]
"""What becomes of a case, which the relations named judge as well. Raises Unanswered if there is no time for that."""


class Unanswered(Exception):  # noqa: N818 - control flow, like StopIteration
    """There is no time left for a run."""


class _Runs:
    """Runs cases near ``suspect``, as many as a question may take."""

    def __init__(self, suspect: FailingCase, run: Run, oracles: Iterable[str] = ()) -> None:
        self._suspect = suspect
        self._run = run
        mine = (suspect.failure.oracle, *oracles)
        self._relations = tuple(one for one in KNOWN if one in mine and oracle_of(one).is_relation)
        self._left = _MOST_RUNS

    def __call__(self, case: Case) -> FailingCase | None:
        """The relative, if it fails in any way that may be the suspect's. Raises Unanswered."""
        found = self.of_any_sort(case)
        return found if found is not None and found.symptom.sort == self._suspect.symptom.sort else None

    def of_any_sort(self, case: Case) -> FailingCase | None:
        """The relative, if it fails in any way. Raises Unanswered."""
        if not self._left:
            raise Unanswered
        self._left -= 1
        return self._run(case, self._relations)


def bug_behind(suspect: FailingCase, known: KnownBugs, run: Run) -> Bug | None:
    """The known bug that ``suspect`` is, however it shows; None if it is none of them, or that is not known.

    Raises Unanswered.
    """
    for bug in known.possible(suspect):
        if _is_foretold(bug, suspect, known, _Runs(suspect, run, [bug.oracle])):
            return bug
    for case in without(SHARED_PAGES, suspect.declaration, suspect.case):  # it decides what lies at a wrong address
        found = _Runs(suspect, run)(case)
        shown = None if found is None else known.predicting(found)
        if shown is not None and not shown.is_told_apart_from(Bug.seen_in(suspect)):
            return shown
    return next((bug for bug in known.beside(suspect) if _is_cured_by(bug, suspect, _Runs(suspect, run))), None)


def _is_foretold(bug: Bug, suspect: FailingCase, known: KnownBugs, run: _Runs) -> bool:
    """Whether no relative fails that lacks what ``bug`` needs."""
    declaration, case = suspect.declaration, suspect.case
    features = case_features(declaration, case)
    removed = [one for aspect in sorted(kernel_parts(bug.features)) for one in without(aspect, declaration, case)]
    lacking = [
        one
        for one in (*removed, *simpler_in_one_respect(suspect))
        if not bug.features <= widened(case_features(declaration, one))
    ]
    if not lacking and bug.features <= widened(features):  # and not what the relation itself adds to any case
        return False
    for relative in lacking:
        found = run(relative)
        if found is not None and known.predicting(found) is None:
            return False
    return True


def _is_cured_by(bug: Bug, suspect: FailingCase, run: _Runs) -> bool:
    """Whether the case passes once it has, besides all of its own, what ``bug`` needs."""
    declaration, case = suspect.declaration, suspect.case
    smallest = decode_case(case.problem, bug.case) if bug.case else None
    both = [] if smallest is None else crossed(declaration, case, smallest)
    asked = (one for one in both if suspect.features | bug.features <= case_features(declaration, one))
    return any(run(one) is None for one in asked)


def bug_of_one_index(suspect: FailingCase, known: KnownBugs, run: Run) -> Bug | None:
    """The known bug that is the same wrong index as that of ``suspect``, which has been shrunk; or None.

    Of the two one raises, since the index is out of range, and the other has wrong numbers, of what lies there where
    there is room. Raises Unanswered.
    """
    return next((bug for bug in known.across(suspect) if _is_of_one_index(bug, suspect, run)), None)


def _is_of_one_index(bug: Bug, suspect: FailingCase, run: Run) -> bool:
    """Whether the smallest case with wrong numbers raises once it has not all that it needs, and has the same cures.

    Whatever keeps the one from raising makes the other right, and never wrong in another way.
    """
    runs, wrong, raised = _Runs(suspect, run, [bug.oracle]), suspect.case, bug.symptom
    if suspect.symptom.is_of_index:
        wrong, raised = decode_case(suspect.case.problem, bug.case), suspect.symptom
    for narrower in simpler_in_one_respect(suspect.with_case(wrong, suspect.failure)):
        seen = runs.of_any_sort(narrower)
        if seen is not None and seen.symptom == raised:
            return _have_the_same_cures(seen, wrong, runs)
    return False


def _have_the_same_cures(raised: FailingCase, wrong: Case, run: _Runs) -> bool:
    """Whether all that keeps ``raised`` from raising makes ``wrong`` right, which has more room, and something does."""
    room = differing(raised.case, wrong)
    supports, options = raised.declaration.supports, raised.declaration.options
    is_cured = False
    for _, other in changes_of(raised.case, supports=supports, options=options):
        changes = differing(raised.case, other)
        with_room = None if set(changes) & set(room) else with_fields_of(wrong, other, changes)
        if with_room is None or not supports_case(supports, options, with_room):
            continue
        seen = run.of_any_sort(other)
        if seen is not None and seen.symptom == raised.symptom:
            continue
        if seen is not None or run.of_any_sort(with_room) is not None:
            return False
        is_cured = True
    return is_cured


def needs_of(found: FailingCase, needed: frozenset[Feature], known: KnownBugs, run: Run) -> frozenset[Feature]:
    """The part of ``needed`` that the failure of ``found``, a smallest case, needs: a neighbour without the rest fails
    too.

    Besides, what only another case tells: that it passes with a value which kernels are often written for.
    """
    runs = _Runs(found, run)
    declaration = found.declaration

    def neighbours() -> Iterator[Case]:
        """First those that tell whether it is the strides of K or V that matter, or that they differ."""
        if KV_STRIDES_DIFFER in needed:
            yield from without(KV_STRIDES_DIFFER, declaration, found.case)
        if KV_STRIDES_DIFFER in needed:
            yield from strides_swapped(declaration, found.case)
        yield from alternatives(declaration, found.case)
        yield from simpler_in_one_respect(found)

    try:
        for case in neighbours():
            if needed <= case_features(declaration, case):
                continue  # nothing to be learned
            other = runs(case)
            if other is not None and known.predicting(other) is None:
                needed &= other.features
        for case in with_numbers_moved(declaration, found.case):
            if needed <= case_features(declaration, case):
                continue
            cures = simpler_beside(found.with_case(case, found.failure), found.case)
            other = runs(case) if cures else None
            if other is not None and known.predicting(other) is None and all(runs(one) is None for one in cures):
                needed &= other.features  # what cures both is one and the same
        # if the numbers matter, another value may pass since it has others
        for feature in [] if needs_numbers(needed) else sorted(one for one in found.features if one.role == "other"):
            for case in without(feature, declaration, found.case):
                beside = [case]
                if isinstance(case, AttentionCase):  # with scores of the order of 1, too: others may hide what is wrong
                    beside.append(msgspec.structs.replace(case, values=plain_values(case, case.values.seed)))
                if all(runs(one) is None for one in beside):
                    needed |= {feature}
    except Unanswered:
        pass  # it is told as far as it is known
    return needed
