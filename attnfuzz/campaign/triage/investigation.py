"""What is done with a failing case: report it at once, confirm it, shrink it, say which bug it is."""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from attnfuzz.campaign.declaration_inference import designs_of, with_declared
from attnfuzz.campaign.identity.finding import FailingCase, Finding
from attnfuzz.campaign.identity.signature import (
    NEEDS_PRECEDING,
    SILENT_ORACLES,
    KnownFindings,
    Signature,
    aspects,
    case_features,
    certain,
    needs_numbers,
)
from attnfuzz.campaign.judge.case_judge import CaseJudge, OutOfTime, Unjudged
from attnfuzz.campaign.messages import Adopted, Confirmed, Duplicate, Found, Minimised, Smaller, Unconfirmed, written
from attnfuzz.campaign.probe_cases import TOLD_ON_ALL_PATHS, ProbeCases, points, trial_of, with_values_of
from attnfuzz.campaign.relatives import (
    alternatives,
    lacking,
    nearest_permitted,
    simpler_in_one_respect,
    strides_swapped,
    with_other_numbers,
    with_simplest_values,
    without,
)
from attnfuzz.campaign.triage.confirmation import (
    Confirmation,
    LeakRetries,
    confirm,
    ever_fails_afresh,
    fewer,
    leak_behind,
    rate_of,
    retries_of,
    simpler,
    still_fails_afresh,
)
from attnfuzz.campaign.triage.contract_gaps import needed_limits
from attnfuzz.campaign.triage.known_deaths import KnownDeaths
from attnfuzz.cases.facets.facet import is_told_by_another
from attnfuzz.declaration import Declaration
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.judging.leaks import LEAK
from attnfuzz.minimise import minimise
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.choices import dtypes_of
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.features import KV_STRIDES_DIFFER, SHARED_PAGES
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import MISTAKES_IN_FORMULAS, PAST_THE_END, RESULT, WITHOUT_WEIGHT, Failure, ends_process

__all__ = ["Investigation"]


_MAX_TRIES = 10
_MISSED = 0.1
"""How often a smaller case that is as flaky may be taken for one that passes."""
_MAX_HANGS_WHILE_SHRINKING = 25
_SHRINKING_LIMIT_S = 60.0
_SHRINKING_DEATHS_LIMIT_S = 25.0
_GENERALISING_LIMIT_S = 5.0
"""For a dozen runs: on a GPU each may have to be compiled, and the next bug waits."""


class _SameBug(Exception):  # noqa: N818 - control flow, like StopIteration
    """The case has come down to a bug that is known."""


class _CutOff(Exception):  # noqa: N818 - as above
    """The campaign has ended while the case was being shrunk."""


class Investigation:
    """Finds out about one failing case, told under the name ``finding``; ``send`` tells the coordinator.

    ``known`` learns what it is, ``deaths`` which cases crash or hang of it.

    ``adopting``: whether the kernel may turn out to round on purpose what it does not declare. Then that is
    ``adopted``, and there is no finding.

    ``is_over`` is asked before each case of shrinking whether the campaign has ended.
    """

    def __init__(
        self,
        finding: str,
        failing: FailingCase,
        *,
        judge: CaseJudge,
        known: KnownFindings,
        deaths: KnownDeaths | None = None,
        send: Callable[[msgspec.Struct], None],
        is_over: Callable[[], bool],
        deadline: float,
        adopting: bool = False,
    ) -> None:
        self.adopted: Numerics | None = None
        self._adopting = adopting
        self._first = self._now = failing
        self._needed = certain(failing.features)
        self._is_flaky = False
        self._symptoms = [failing.symptom]
        self._finding = finding
        self._send = send
        self._known = known
        self._deaths = KnownDeaths() if deaths is None else deaths
        self._judge = judge
        self._retries = retries_of(failing, judge, self._deaths)
        self._is_over = is_over
        self._shrink_until = deadline
        self._tries = 1
        self._afresh = False
        self._steps: list[FailingCase] = []
        self._hangs = 0
        self._failing: FailingCase | None = None

    def run(self) -> bool:
        """Whether the case shows a bug, known or new; False if it never failed again or time ran out before that."""
        if self._is_known_to_need_others():
            return True
        now = self._now
        if self._is_design():
            return True
        fields = written(now.case, now.failure, now.preceding)
        self._send(Found(finding=self._finding, kernel=now.declaration.target, **fields))
        try:
            if not self._confirm():
                return False
        except OutOfTime:  # it was seen, if only once: the coordinator reports it as not confirmed
            return False
        except _SameBug:
            self._close_as_known()
            return True
        try:
            self._look_beneath_rounding()
            self._look_past_shared_pages()
            self._recognise()
            self._shrink()
        except _SameBug:
            self._close_as_known()
        else:
            if self._now.failure.designs != self._first.failure.designs and self._is_design(self._finding):
                return True
            self._look_beside()
            self._generalise()
            self._close_as_new()
        return True

    def _is_design(self, finding: str = "") -> bool:
        """Whether the case, by itself, only shows what the kernel rounds on purpose, though it does not say so; tell.

        With the declaration of that, the case passes, with other numbers as well, and so do those that tell roundings.
        And it rounds so whatever the shape: what only some of its paths do, nobody has decided.
        """
        now = self._now
        if not self._adopting or self._is_flaky or not now.failure.designs:
            return False
        before = now.declaration.numerics
        try:
            alone = self._failure_of(now.declaration, now.case)
            for numerics in designs_of(before, () if alone is None else alone.designs):
                if self._passes_with(numerics) and self._rounds_throughout(numerics):
                    self.adopted, target = numerics, now.declaration.target
                    fields = {name: value for name, value in numerics.declared().items() if before.leaves_open(name)}
                    self._send(Adopted(kernel=target, numerics=fields, failure=now.failure, finding=finding))
                    return True
        except OutOfTime:
            return False
        return False

    def _passes_with(self, numerics: Numerics) -> bool:
        now = self._now
        declared = with_declared(now.declaration, Supports(), numerics)
        supports = declared.supports
        telling = (
            case
            for dtype in dtypes_of(supports)
            for point in itertools.islice(points(declared), 1)
            for kept in [ProbeCases(declared, msgspec.structs.replace(point, dtypes=(dtype,)))]
            for case in kept.permitted(kept.of_roundings())
        )
        cases = itertools.chain((now.case,), with_other_numbers(now), telling)
        return all(self._failure_of(declared, case) is None for case in cases)

    def _rounds_throughout(self, numerics: Numerics) -> bool:
        """Whether it does so in each shape in which that can be told: without the declaration some case of it fails.

        The values of the case are what it is asked about: kernels may be compiled for each head size by themselves.
        """
        now = self._now
        declared = with_declared(now.declaration, Supports(), numerics)
        adopted = {name for name in numerics.declared() if now.declaration.numerics.leaves_open(name)}
        point = next(points(declared), None)
        if point is None or not adopted & TOLD_ON_ALL_PATHS:
            return True
        kept = ProbeCases(declared, with_values_of(now.case, point))
        shapes = filter(None, map(kept.permitted, kept.of_paths()))
        return all(any(self._failure_of(now.declaration, case) is not None for case in shape) for shape in shapes)

    def _is_known_to_need_others(self) -> bool:
        """A symptom that is known to need other cases, on a case that ran after some and does not fail alone."""
        if not self._first.preceding or not self._known.needs_preceding(self._first.symptom):
            return False
        try:
            return self._retries.alone(self._first.case, afresh=True) is None
        except OutOfTime:
            return True

    def _confirm(self) -> bool:
        """Tell how it comes back; False if it does not."""
        leak = leak_behind(self._first, self._judge)
        if leak is not None:
            self._take_for(leak)
        confirmation = confirm(self._first, self._retries)
        if not confirmation.failures:
            self._send(Unconfirmed(finding=self._finding, runs=confirmation.runs))
            return False
        is_another = confirmation.failing.symptom != self._first.symptom
        is_told_more = confirmation.failing.failure.tensor != self._first.failure.tensor
        self._first = confirmation.failing
        self._now, self._needed = self._first, certain(self._first.features)
        self._is_flaky = confirmation.is_flaky
        if self._first.preceding or is_another or (is_told_more and not self._is_flaky):
            self._step_to(self._first)
        elif confirmation.is_flaky:
            self._look_at_flakiness(confirmation)
        self._tell_rate(confirmation)
        return True

    def _take_for(self, leak: FailingCase) -> None:
        """Go on with what the death came of."""
        if self._known.explains(leak.symptom, leak.features):
            raise _SameBug
        self._first = leak
        self._retries = LeakRetries(self._judge, leak.declaration)
        self._step_to(leak)

    def _look_at_flakiness(self, confirmation: Confirmation) -> None:
        """Runs that differ are one bug, whatever other oracles make of them; the determinism oracle names it best."""
        passed = 1 - len(confirmation.failures) / confirmation.runs
        self._tries = min(_MAX_TRIES, math.ceil(math.log(_MISSED) / math.log(passed))) if passed else 1
        if ends_process(self._first.failure):
            return
        known = self._known.flaky_one(self._first.declaration.target, self._needed)
        if known is not None:
            self._needed = known.features
            raise _SameBug
        named = next((failure for failure in confirmation.failures if failure.oracle == "determinism"), None)
        if named is not None:
            self._step_to(self._first.as_(self._first.case, named))

    def _look_beneath_rounding(self) -> None:
        """Where only bits differ, the case with the simplest values may be plainly wrong: that is the bug then.

        The oracles that compare bits see a wrong number too where the values are so large that it stays within the
        bound, and so do the statistics of ``residuals``. These are of whatever tokens the kernel reads, so where the
        plain case shows a bug that is known, they are that bug; and where one of their own cases is plainly wrong, it
        is that bug which they see.
        """
        is_statistics = self._now.failure.oracle == "residuals"
        if self._cannot_be_compared() or not (self._now.symptom.is_rounding or is_statistics):
            return
        plain = with_simplest_values(self._now)
        others = with_other_numbers(self._now)[:1] if is_statistics else []
        for case in ([] if plain is None else [plain]) + others:
            try:
                found = self._failing_one(case)
            except OutOfTime:
                return
            if found is None or found.symptom.oracle not in SILENT_ORACLES:
                continue
            if not self._known.explains(found.symptom, found.features):
                self._needed, self._symptoms = certain(found.features), []
                self._step_to(found)
                return
            if is_statistics:
                self._close_as(*self._known.explaining(found.symptom, found.features))

    def _look_past_shared_pages(self) -> None:
        """What lies past the end of a sequence is a token of another one on a page that both share, else dead memory.

        So a row that shows another's token is the bug that the case with no shared page shows in dead memory.
        """
        symptom, cause = self._now.symptom, self._now.failure.cause
        is_wrong = symptom.oracle == "accuracy" and not symptom.is_cause and cause not in MISTAKES_IN_FORMULAS
        if self._cannot_be_compared() or not (is_wrong or symptom.oracle == "containment"):
            return
        for alone in without(SHARED_PAGES, self._now.declaration, self._now.case):
            try:
                found = self._failing_one(alone)
            except OutOfTime:
                return
            if found is None or found.symptom.oracle != "dead_memory":
                continue
            if is_wrong and cause != PAST_THE_END and found.failure.cause == WITHOUT_WEIGHT:
                continue  # another's token is a number: without weight it makes no difference
            if self._known.explains(found.symptom, found.features):
                self._needed = frozenset({SHARED_PAGES})
                raise _SameBug
            self._needed, self._symptoms = certain(found.features), []
            self._step_to(found)

    def _recognise(self) -> None:
        """Ask whether a known bug is behind it that shows in another way here: not if a relative fails without it."""
        if self._cannot_be_compared():
            return
        until = min(self._shrink_until, time.monotonic() + _GENERALISING_LIMIT_S)
        for known in self._known.alike(self._now.symptom, case_features(self._now.declaration, self._now.case)):
            relatives = lacking(known, self._now)
            try:
                if relatives and not any(self._shows_alike(case, until) for case in relatives):
                    self._needed &= known.features
                    self._close_as(known)
            except OutOfTime:
                return

    def _close_as(self, *known: Signature) -> NoReturn:
        """End here: it is one of the bugs ``known``, and passes where they pass."""
        self._needed |= {one for signature in known for one in signature.features if is_told_by_another(one)}
        raise _SameBug

    def _cannot_be_compared(self) -> bool:
        return self._is_flaky or bool(self._now.preceding)

    def _shows_alike(self, case: Case, until: float) -> bool:
        """Whether ``case`` fails as the failing does, and of no known bug. Raises OutOfTime past ``until``."""
        if time.monotonic() >= until or self._is_over():
            raise OutOfTime(0.0)
        other, mine = self._failing_one(case), self._now.symptom
        if other is None or self._known.explains(other.symptom, other.features):
            return False
        return other.symptom == mine if mine.is_rounding else other.symptom.may_be(mine)

    def _failing_one(self, case: Case) -> FailingCase | None:
        failure = self._retries.alone(case, patience="short", afresh=self._afresh)
        return None if failure is None else self._now.as_(case, failure)

    def _look_beside(self) -> None:
        """Find out whether the strides of K or V matter, or that they differ: the smallest case cannot tell."""
        if KV_STRIDES_DIFFER not in self._needed or self._now.preceding:
            return
        declaration, case = self._now.declaration, self._now.case
        try:
            for sibling in without(KV_STRIDES_DIFFER, declaration, case):
                other = self._failing_one(sibling)
                if other is not None and other.symptom == self._now.symptom:
                    self._needed &= other.features
            swapped = strides_swapped(declaration, case) if KV_STRIDES_DIFFER in self._needed else None
            if swapped is not None and self._fails_alike(swapped):
                self._needed &= case_features(declaration, swapped)
        except (OutOfTime, _CutOff, _SameBug):
            return

    def _generalise(self) -> None:
        """Drop what the smallest case happens to have: a value in whose place another one fails in the same way."""
        failure = self._now.failure
        if self._is_flaky or self._now.preceding or failure.oracle == "hang":
            return
        until = min(self._shrink_until, time.monotonic() + _GENERALISING_LIMIT_S)
        for other_case in (*alternatives(self._now.declaration, self._now.case), *simpler_in_one_respect(self._now)):
            if time.monotonic() >= until or self._is_over():
                return
            if self._needed <= case_features(self._now.declaration, other_case):
                continue  # nothing to be learned
            try:
                other = self._failing_one(other_case)
            except OutOfTime:
                return
            if other is None or not other.symptom.may_be(self._now.symptom):
                continue
            if not self._known.explains(other.symptom, other.features):
                self._needed &= other.features
        self._try_usual_values(until)

    def _try_usual_values(self, until: float) -> None:
        """Add what only another case tells: that it passes with a value which kernels are often written for.

        If the numbers matter, it may pass since it has others.
        """
        if needs_numbers(self._needed):
            return
        for feature in sorted(filter(is_told_by_another, self._now.features)):
            for case in without(feature, self._now.declaration, self._now.case):
                if time.monotonic() >= until or self._is_over():
                    return
                try:
                    self._needed |= {feature} if self._failing_one(case) is None else set()
                except OutOfTime:
                    return

    def _shrink(self) -> None:
        before = self._now
        deadly = ends_process(before.failure)
        limit_s = _SHRINKING_DEATHS_LIMIT_S if deadly else _SHRINKING_LIMIT_S
        self._shrink_until = min(self._shrink_until, time.monotonic() + limit_s)
        try:
            self._minimise()
            self._shrink_preceding()
            if before.failure.oracle == "hang":
                if self._now is not before and not self._still_hangs():
                    self._step_back(before)
            elif self._is_flaky or not still_fails_afresh(self._now, self._retries):
                self._look_again(before)
        except _CutOff:
            self._shrink_until = -math.inf
        except OutOfTime:
            return

    def _minimise(self) -> None:
        minimise(
            self._now.case,
            self._fails_alike,
            supports=self._now.declaration.supports,
            options=self._now.declaration.options,
            deadline=self._shrink_until,
            on_smaller=self._keep,
        )

    def _shrink_preceding(self) -> None:
        """Fewer and simpler cases before the failing one, which is smaller now."""
        if not self._now.preceding:
            return
        until, now = self._shrink_until, self._now
        kept = fewer(now.preceding, self._fails_after, until=until)
        now = FailingCase(now.declaration, now.case, now.failure, kept)
        kept = simpler(now, self._fails_after, until=until)
        self._step_to(FailingCase(now.declaration, now.case, now.failure, kept))

    def _fails_after(self, preceding: Sequence[Case]) -> bool:
        if self._is_over():
            raise _CutOff
        failure = self._retries.after(preceding, self._now.case, patience="short")
        return failure is not None and self._now.as_(self._now.case, failure).symptom == self._now.symptom

    def _look_again(self, before: FailingCase) -> None:
        """What is saved must fail in a process of its own, or with a rate that is known; or else what it came from."""
        if not self._is_flaky and not ever_fails_afresh(self._now, self._retries):
            self._shrink_afresh(before)
            if still_fails_afresh(self._now, self._retries):
                return
        rate = rate_of(self._now, self._retries)
        if not rate.failures and self._now is not before:
            self._step_back(before)
            rate = rate_of(before, self._retries)
        if rate.failures:
            self._is_flaky = rate.is_flaky
            self._tell_rate(rate)

    def _shrink_afresh(self, before: FailingCase) -> None:
        """Go on from the last step that fails in a fresh process: later ones needed what the cases tried had left."""
        steps = [before, *self._steps]
        good = bisect.bisect_left(steps, 1, lo=1, key=lambda step: not ever_fails_afresh(step, self._retries)) - 1
        self._afresh = True
        self._needed = certain(frozenset.intersection(*(step.features for step in steps[: good + 1])))
        self._step_to(steps[good])
        self._minimise()

    def _fails_alike(self, case: Case) -> bool:
        """Whether ``case`` shows the same symptom and is not another bug that is known."""
        if self._is_over():
            raise _CutOff
        if self._hangs >= _MAX_HANGS_WHILE_SHRINKING:
            return False
        for _ in range(self._tries):
            try:
                failure = self._retries.after(self._now.preceding, case, patience="short", afresh=self._afresh)
            except OutOfTime as cut:
                raise _CutOff from cut
            self._hangs += failure is not None and failure.oracle == "hang"
            if failure is not None and self._is_alike(self._now.as_(case, failure)):
                return True
        return False

    def _is_alike(self, other: FailingCase) -> bool:
        if other.symptom != self._now.symptom:
            return False
        if self._known.explains(other.symptom, other.features):
            if self._known.explains(self._now.symptom, self._now.features):  # others have found it since
                self._needed &= other.features
                self._close_as(*self._known.explaining(other.symptom, other.features))
            return False
        if self._known.may_cause(other.symptom.kernel, other.failure):
            return False
        if not set(other.failure.replays) <= set(self._now.failure.replays):
            return False  # a smaller case that another rounding explains, too, would be told as that one
        if self._now.failure.cause in MISTAKES_IN_FORMULAS and other.failure.cause != self._now.failure.cause:
            return False  # likewise: a mistake gives few numbers by chance that another one gives
        self._failing = other
        return True

    def _keep(self, case: Case) -> None:
        if self._failing is None or self._failing.case != case:
            raise RuntimeError(f"minimise() kept a case that was not judged last: {encode_case(case).decode()}")
        self._steps.append(self._failing)
        self._step_to(self._failing)

    def _still_hangs(self) -> bool:
        """Whether the minimal case hangs for longer than it had while shrinking, too."""
        failure = self._retries.after(self._now.preceding, self._now.case, patience="longest")
        if failure is None or failure.oracle != "hang":
            return False
        self._step_to(self._now.as_(self._now.case, failure))
        return True

    def _step_to(self, failing: FailingCase) -> None:
        """Go on with ``failing``, and tell of it."""
        self._now = failing
        self._needed &= failing.features
        if failing.symptom not in self._symptoms:
            self._symptoms.append(failing.symptom)
        self._send(Smaller(finding=self._finding, **written(failing.case, failing.told, failing.preceding)))

    def _step_back(self, before: FailingCase) -> None:
        """Return to an earlier step: later ones say nothing."""
        self._step_to(before)
        self._needed = certain(before.features)

    def _tell_rate(self, confirmation: Confirmation) -> None:
        self._send(Confirmed(finding=self._finding, failed=len(confirmation.failures), runs=confirmation.runs))

    def _close_as_known(self) -> None:
        shown_as = self._learn()
        self._send(Duplicate(finding=self._finding, features=self._needed, shown_as=shown_as, flaky=self._is_flaky))

    def _close_as_new(self) -> None:
        is_complete, is_declarable = time.monotonic() < self._shrink_until, self._passes_as_declared()
        features = certain(self._now.features)
        if not aspects(self._needed) and aspects(features):
            self._needed = features  # it slipped from one bug to another, which must not explain both
        if self._now.preceding:
            self._needed |= {NEEDS_PRECEDING}
        explanation = self._explanation()
        if explanation.told is not None and explanation.told != self._now.failure:
            self._step_to(self._now.as_(self._now.case, explanation.told))
        self._send(
            Minimised(
                finding=self._finding,
                features=self._needed,
                shown_as=self._learn(),
                complete=is_complete,
                flaky=self._is_flaky,
                explanation=explanation.lines,
                blame=explanation.blame,
                sources=explanation.sources,
                weights=explanation.rows,
                declarable=is_declarable,
            )
        )

    def _explanation(self) -> Explanation:
        """What is wrong with the case, if it always fails; nothing of one that needs others before it."""
        now = self._now
        if self._is_flaky or now.preceding or now.failure.kind == LEAK:
            return Explanation()
        try:
            return self._judge.explain(now.declaration, now.case, now.failure)
        except Unjudged:
            return Explanation()

    def _learn(self) -> tuple[tuple[str, str], ...]:
        """Take later failures with any symptom of this bug for it; the symptoms."""
        for symptom in self._symptoms:
            signature = Signature(symptom, self._needed)
            self._known.add(signature, flaky=self._is_flaky)
            if not self._is_flaky:
                self._deaths.learn(signature)
        return tuple((symptom.oracle, symptom.kind) for symptom in self._symptoms)

    def _passes_as_declared(self) -> bool:
        """Whether the declaration that would end the finding, if there is one, leaves out what fails and no less."""
        now = self._now
        finding = Finding("", now.declaration, now.case, now.failure, 0.0, shrunk_s=0.0, features=self._needed)
        if self._is_flaky or now.preceding or not (limits := needed_limits(finding)):
            return True
        supports = msgspec.structs.replace(now.declaration.supports, **limits)
        declared = FailingCase(msgspec.structs.replace(now.declaration, supports=supports), now.case, now.failure)
        case = nearest_permitted(declared)
        if case is None:
            return False
        try:
            failure = retries_of(declared, self._judge, self._deaths).alone(case, patience="short")
            if failure is not None and declared.as_(case, failure).symptom == now.symptom:
                return False
            return self._bears_out(declared.declaration, limits)
        except OutOfTime:
            return False

    def _bears_out(self, declared: Declaration, limits: Mapping[str, Any]) -> bool:
        """Whether other cases say, too, that the kernel is one that may declare ``limits``. Raises OutOfTime.

        Of all that is left out, of whatever shape, it takes nothing, where it takes what is like it and kept: it raises
        for each, if that is how the case failed. Of a log-sum-exp all rows say so.
        """
        now = self._now
        if limits.keys() == {"lse"}:
            return self._has_no_natural_lse(declared)
        refuses = now.failure.oracle == "exception"
        is_kept = False
        for kept, left_out in trial_of(now.declaration, limits, now.case):
            failure = self._failure_of(now.declaration, left_out)
            if failure is None or (refuses and (failure.oracle, failure.kind == RESULT) != ("exception", False)):
                return False
            before = self._failure_of(declared, kept)
            is_kept |= before is None or (refuses and before.oracle != "exception")
        return is_kept

    def _has_no_natural_lse(self, declared: Declaration) -> bool:
        """Whether all rows of which the output is right have no log-sum-exp, or one to another base, as declared."""
        natural = self._now.declaration
        alone = msgspec.structs.replace(natural, supports=msgspec.structs.replace(natural.supports, lse="none"))
        is_told = False
        ordinary = next(points(natural), None)
        for case in ProbeCases(natural, ordinary).single_rows() if ordinary is not None else ():
            if self._failure_of(alone, case) is not None:
                continue
            failure = self._failure_of(natural, case)
            if declared.supports.lse == "none" and (failure is None or failure.oracle != "unwritten"):
                return False
            if self._failure_of(declared, case) is not None:
                return False
            is_told |= failure is not None
        return is_told

    def _failure_of(self, declaration: Declaration, case: Case) -> Failure | None:
        failing = FailingCase(declaration, case, self._now.failure)
        return retries_of(failing, self._judge, self._deaths).alone(case, patience="short")
