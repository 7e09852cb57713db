"""Investigates a failing case: reports it at once, confirms it, shrinks it, finds out which bug it is."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from attnfuzz.campaign.declaration_inference import designs_of, with_declared
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.judge.case_judge import CaseJudge, OutOfTime, Patience, Unjudged
from attnfuzz.campaign.messages import Adopted, Confirmed, Duplicate, Found, Minimised, Smaller, Unconfirmed, written
from attnfuzz.campaign.probe_cases import TOLD_ON_ALL_PATHS, ProbeCases, points, trial_of, with_values_of
from attnfuzz.campaign.triage.confirmation import (
    Allowance,
    Confirmation,
    LeakRetries,
    confirm,
    ever_fails_afresh,
    fewer,
    leak_behind,
    more_alike,
    rate_of,
    retries_of,
    still_fails_afresh,
)
from attnfuzz.campaign.triage.contract_gaps import needed_limits
from attnfuzz.campaign.triage.known_deaths import KnownDeaths
from attnfuzz.cases.facets.storage import KV_STRIDES_DIFFER, cache_names, strided
from attnfuzz.cases.supported import supports_case
from attnfuzz.declaration import Declaration
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.identity.asking import Unanswered, bug_behind, bug_of_one_index, needs_of
from attnfuzz.identity.bug import Bug, FailingCase, KnownBugs, bugs_shown, is_alike, is_leak, is_refusal, tag_of
from attnfuzz.identity.differences import differing, with_fields_of
from attnfuzz.identity.features import NEEDS_PRECEDING, kernel_parts, unconditional
from attnfuzz.identity.nearby_cases import in_other_formats, nearest_permitted, with_other_numbers
from attnfuzz.minimise import minimise
from attnfuzz.oracles.registry import ACCURACY, DETERMINISM, EXCEPTION, HANG, RESIDUALS, UNWRITTEN, OracleName
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.choices import dtypes_of, without_lse
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Failure, Relations, ends_process

_MAX_TRIES = 10
_MISSED = 0.1
"""Accepted rate of taking a smaller flaky case for one that passes, while a flaky failure is shrunk."""
_MAX_HANGS_WHILE_SHRINKING = 25
_SHRINKING_RUNS = 500
_SHRINKING_DEATHS = 60
"""Runs of which each costs a process."""
_SEQUENCE_RUNS = 400
_CASES_TRIED = 12
"""Most cases of the campaign that are run under a declaration that would exclude a finding."""
_SHARE_FOR_COMPILERS = 0.25
"""Share of the remaining time for which shrinking may wait for formats that the interpreter cannot decide about."""
_HANG_GUARD_S = 300.0
"""No shrinking takes that long but where runs hang."""
_PLACING_S = 4.0
"""Kept of the campaign, as far as there is time, for saying which bug a case shows that is not shrunk by then, and why:
what is neither is told beneath another finding, if at all."""


class _SameBug(Exception):  # noqa: N818 - control flow, like StopIteration
    """The case shows ``bug``, which is known."""

    def __init__(self, bug: Bug) -> None:
        super().__init__()
        self.bug = bug


class _CutOff(Exception):  # noqa: N818 - as above
    """The campaign has ended while the case was being shrunk."""


class Investigation:
    """Finds out about one failing case, told under the name ``finding``; ``send`` tells the coordinator.

    ``known`` learns what it is, ``deaths`` which cases crash or hang of it.

    ``adopting``: whether the kernel may turn out to round on purpose what it does not declare. Then that is
    ``adopted``, and there is no finding. ``numerics``: what kernels have turned out to round, by target.

    ``is_over`` is asked before each case of shrinking whether the campaign has ended.
    """

    def __init__(
        self,
        finding: str,
        failing: FailingCase,
        *,
        judge: CaseJudge,
        known: KnownBugs,
        deaths: KnownDeaths | None = None,
        send: Callable[[msgspec.Struct], None],
        is_over: Callable[[], bool],
        deadline: float,
        adopting: bool = False,
        numerics: Mapping[str, Numerics] = MappingProxyType({}),
    ) -> None:
        self.target = failing.declaration.target
        self.adopted: Numerics | None = None
        self._adopting = adopting
        self._numerics = numerics
        self._asked_for_designs: tuple[object, ...] = ()
        self._asked_about: tuple[Declaration, Case, Failure] | None = None
        self._answer = Explanation()
        self._first = self._now = failing
        self._is_flaky = False
        self._same_as = ""
        self._shown = [failing]
        self._finding = finding
        self._send = send
        self._known = known
        self._deaths = KnownDeaths() if deaths is None else deaths
        self._judge = judge
        self._retries = retries_of(failing, judge, self._deaths)
        self._is_over = is_over
        self._deadline = self._shrink_until = deadline
        self._allowance = Allowance(_SHRINKING_RUNS)
        self._is_cut_off = False
        self._tries = 1
        self._afresh = False
        self._in_interpreter: dict[tuple[bytes, Relations], FailingCase | None] = {}
        self._shows_there: bool | None = None
        self._compilers_left_s = 0.0
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
        self._tag = tag_of(now.declaration.target, now.case, now.failure)
        self._judge.start_interpreter(now.declaration)
        try:
            if not self._confirm():
                return False
            if self._is_design(self._finding):  # it needs none of the cases before it, of which nothing can be asked
                return True
            self._recognise()
            self._take_numbers_of_relation()
            self._shrink()
            if not self._is_shrunk:
                self._recognise()  # smaller, it answers more
            self._recognise_index()
        except OutOfTime:  # it was seen, if only once: the coordinator reports it as not confirmed
            return False
        except _SameBug as same:
            needed, told = same.bug.features & self._now.features, None
            if same.bug.symptom.sort != self._now.symptom.sort:  # and what else shows so may be another bug
                needed = self._needs()
                told = self._now if self._now.symptom.is_of_index else None
            self._send(Duplicate(finding=self._finding, bugs=self._learn(needed, same.bug.finding, told)))
        else:
            if self._is_design(self._finding, is_smallest=True):
                return True
            self._close_as_new()
        return True

    def _is_design(self, finding: str = "", *, is_smallest: bool = False) -> bool:
        """Whether the case, by itself, only shows what the kernel rounds on purpose, though it does not say so; tell.

        With the declaration of that, the case passes, with other numbers as well, and so do those that tell roundings.
        And it rounds so whatever the shape: what only some of its paths do, nobody has decided. Another bug of the
        kernel may show in all of these, once it is known. ``finding``: what has been told of the case. Of that which
        ``is_smallest``, runs on other cases are asked for roundings that its own numbers do not tell.
        """
        now = self._now
        if not self._adopting or self._is_flaky or now.preceding or now.failure.oracle != ACCURACY.name:
            return False
        numerics = self._numerics.get(now.declaration.target)
        asked = now.failure.designs, len(self._known.of_sort(now.symptom)), numerics, is_smallest
        if asked == self._asked_for_designs:
            return False
        self._asked_for_designs = asked
        before = now.declaration.numerics
        try:
            found = next(self._designs(is_smallest), None)
        except OutOfTime:
            return False
        if found is None:
            return False
        self.adopted = found
        fields = {name: value for name, value in found.declared().items() if before.leaves_open(name)}
        self._send(Adopted(kernel=self.target, numerics=fields, failure=now.failure, finding=finding))
        return True

    def _designs(self, is_smallest: bool) -> Iterator[Numerics]:
        """The intended roundings that the kernel was found to have, if they explain the case; else those of replays.

        Of the smallest case also those that runs on other cases leave, if it may be a rounding at all. Where a known
        bug spoils the log-sum-exp alone, replays are of the output. Raises OutOfTime.
        """
        now, before = self._now, self._now.declaration.numerics
        since = self._numerics.get(now.declaration.target, before)
        if since != before and self._is_content(self._declaring(since), now.case):
            yield since
        spoilt = any(bug.is_of_lse for bug in self._known.of_sort(now.symptom))
        shown = self._of_output(now.declaration) if spoilt else now.declaration
        alone = self._failure_of(shown, now.case) if now.failure.designs or spoilt else now.failure
        if alone is None:
            return
        told = self._explained(shown, now.case, alone).told if is_smallest and alone.maybe else None
        named = (*designs_of(before, alone.designs), *designs_of(before, () if told is None else told.designs))
        for numerics in dict.fromkeys(named):
            if self._passes_with(numerics) and self._rounds_throughout(numerics) and self._is_told(shown, alone):
                yield numerics

    def _is_told(self, shown: Declaration, failure: Failure) -> bool:
        """Whether runs on other cases leave nothing but designs of all that may be behind a failure.

        Where there was no time for any, its replay, and that cases pass with it, is enough.
        """
        told = self._explained(shown, self._now.case, failure).told
        return told is None or (bool(told.causes) and all(one.numerics for one in told.causes))

    def _declaring(self, numerics: Numerics) -> Declaration:
        return with_declared(self._now.declaration, Supports(), numerics)

    @staticmethod
    def _of_output(declaration: Declaration) -> Declaration:
        """As if the kernel gave no log-sum-exp."""
        return msgspec.structs.replace(declaration, supports=without_lse(declaration.problem, declaration.supports))

    def _passes_with(self, numerics: Numerics) -> bool:
        now, declared = self._now, self._declaring(numerics)
        supports = declared.supports
        caches = (None, quantised) if (quantised := self._quantised(numerics)) else (None,)
        telling = (
            case
            for dtype in dtypes_of(supports)
            for point in itertools.islice(points(declared), 1)
            for kv in caches
            for kept in [ProbeCases(declared, msgspec.structs.replace(point, dtypes=(dtype,)), kv=kv)]
            for case in kept.permitted(kept.of_roundings())
        )
        cases = itertools.chain((now.case,), with_other_numbers(now), telling)
        return all(self._is_content(declared, case) for case in cases)

    def _is_content(self, declared: Declaration, case: Case) -> bool:
        """Whether a case passes, or only shows a bug that is known.

        Two roundings give errors that neither gives alone: what fails alike in another format, of a known bug, is that.
        """
        failure = self._failure_of(declared, case)
        if failure is None:
            return True
        failing = FailingCase(declared, case, failure)
        if not self._known.of_sort(failing.symptom):
            return False
        if self._known.predicting(failing) is not None:
            return True
        for other in in_other_formats(declared, case):
            beside = self._failure_of(declared, other)
            if beside is None:
                continue
            twin = failing.with_case(other, beside)
            if twin.symptom == failing.symptom and self._known.predicting(twin) is not None:
                return True
        return False

    def _rounds_throughout(self, numerics: Numerics) -> bool:
        """Whether it does so in each shape in which that can be told: without the declaration some case of it fails.

        The values of the case are what it is asked about: kernels may be compiled for each head size by themselves.
        """
        now, declared = self._now, self._declaring(numerics)
        quantised, point = self._quantised(numerics), next(points(declared), None)
        if point is None or not (quantised or self._adopted_by(numerics) & TOLD_ON_ALL_PATHS):
            return True
        kept = ProbeCases(declared, with_values_of(now.case, point), kv=quantised)
        shapes = filter(None, map(kept.permitted, kept.of_paths()))
        return all(any(self._failure_of(now.declaration, case) is not None for case in shape) for shape in shapes)

    def _adopted_by(self, numerics: Numerics) -> set[str]:
        """The fields that ``numerics`` says and the declaration leaves open."""
        return {name for name in numerics.declared() if self._now.declaration.numerics.leaves_open(name)}

    def _quantised(self, numerics: Numerics) -> QuantisedKv | None:
        """The 8-bit cache of the case, where its numbers are said to be rounded, with scales that tell it."""
        kv: QuantisedKv | None = getattr(self._now.case, "kv", None)
        if kv is None or "dequantised" not in self._adopted_by(numerics):
            return None
        return msgspec.structs.replace(kv, scales="scattered")

    def _is_known_to_need_others(self) -> bool:
        """A case that ran after others and does not fail alone, of a kernel that is known to keep something of those.

        What is left of an earlier call shows in numbers and in memory, by whatever oracle looks first.
        """
        known = self._known.of_sort(self._first.symptom)
        if not self._first.preceding or not any(bug.needs_others for bug in known):
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
        self._now = self._first
        self._is_flaky = confirmation.is_flaky
        if self._first.preceding or is_another or (is_told_more and not self._is_flaky):
            self._step_to(self._first)
        elif confirmation.is_flaky:
            self._look_at_flakiness(confirmation)
        self._tell_rate(confirmation)
        return True

    def _take_for(self, leak: FailingCase) -> None:
        """Go on with what the death came of."""
        if (bug := self._known.predicting(leak)) is not None:
            raise _SameBug(bug)
        self._first = leak
        self._retries = LeakRetries(self._judge, leak.declaration)
        self._step_to(leak)

    def _look_at_flakiness(self, confirmation: Confirmation) -> None:
        """Runs that differ are one bug, whatever other oracles make of them; the determinism oracle names it best."""
        passed = 1 - len(confirmation.failures) / confirmation.runs
        self._tries = min(_MAX_TRIES, math.ceil(math.log(_MISSED) / math.log(passed))) if passed else 1
        if ends_process(self._first.failure):
            return
        if (bug := self._known.predicting(self._first, flaky=True)) is not None:
            raise _SameBug(bug)
        named = next((failure for failure in confirmation.failures if failure.oracle == DETERMINISM.name), None)
        if named is not None:
            self._step_to(self._first.with_case(self._first.case, named))

    def _recognise(self) -> None:
        """Ask whether a known bug is behind it that shows in another way here.

        What one run of the kernel shows says more than what a relation saw, and is shrunk all the same.
        """
        if self._is_flaky or self._now.preceding:
            return
        try:
            bug = bug_behind(self._now, self._known, self._run_relative)
        except Unanswered:
            return
        if bug is None:
            return
        if not bug.is_of_relation or Bug.seen_in(self._now).is_of_relation:
            raise _SameBug(bug)
        self._same_as = bug.finding

    def _recognise_index(self) -> None:
        """Ask whether a known bug is the same wrong index, which is out of range in one of the two."""
        if self._is_shrunk and not self._is_flaky and not self._now.preceding:
            with contextlib.suppress(Unanswered):
                if (bug := bug_of_one_index(self._now, self._known, self._run_relative)) is not None:
                    raise _SameBug(bug)

    def _take_numbers_of_relation(self) -> None:
        """Where a relation's own numbers are plainly wrong, go on with a case of them, which may become small.

        And it is told with what fails alike in cases as they are drawn.
        """
        now = self._now
        if now.failure.oracle != RESIDUALS.name or now.symptom.oracle == RESIDUALS.name or now.preceding:
            return
        for case in with_other_numbers(now):
            try:
                failure = self._retries.alone(case, patience="short", afresh=self._afresh)
            except OutOfTime:
                return
            if failure is not None and failure.oracle == ACCURACY.name:
                self._step_to(now.with_case(case, failure))
                self._retries = retries_of(self._now, self._judge, self._deaths)
                self._recognise()
                return

    def _run_relative(self, case: Case, relations: tuple[OracleName, ...]) -> FailingCase | None:
        if self._is_over() or time.monotonic() >= self._deadline:
            raise Unanswered
        try:
            if self._judge.compiles_for_long(self._now.declaration, case) and self._shows_in_interpreter():
                return self._interpreted(case, relations or self._retries.relations)
            failure = self._retries.alone(case, patience="short", afresh=self._afresh, relations=relations)
        except OutOfTime as cut:
            raise Unanswered from cut
        return None if failure is None else self._now.with_case(case, failure)

    def _needs(self) -> frozenset[Feature]:
        """Features of all cases on the way that failed as the last one, as far as its neighbours need them too."""
        now = self._now
        alike = [one for one in self._shown if one.symptom == now.symptom] or [now]
        needed = unconditional(frozenset.intersection(*(one.features for one in alike)))
        if not kernel_parts(needed) and kernel_parts(unconditional(now.features)):
            needed = unconditional(now.features)  # it slipped from one bug to another, which must not explain both
        if not self._is_flaky and not now.preceding and now.failure.oracle != HANG.name:
            needed = needs_of(now, needed, self._known, self._run_relative)
        return needed | {NEEDS_PRECEDING} if now.preceding else needed

    def _shrink(self) -> None:
        before = self._now
        deadly = ends_process(before.failure)
        self._allowance = Allowance(_SHRINKING_DEATHS if deadly else _SHRINKING_RUNS)
        now = time.monotonic()
        self._shrink_until = min(now + _HANG_GUARD_S, self._deadline - min(_PLACING_S, (self._deadline - now) / 4))
        self._compilers_left_s = _SHARE_FOR_COMPILERS * (self._shrink_until - now)
        try:
            self._shrink_preceding()
            self._minimise_cheaply()
            self._minimise_while(self._fails_alike, self._keep)
            self._shrink_preceding()
            if before.failure.oracle == HANG.name:
                if self._now is not before and not self._still_hangs():
                    self._step_back(before)
            elif self._is_flaky or not still_fails_afresh(self._now, self._retries):
                self._look_again(before)
        except _CutOff:
            self._shrink_until = -math.inf
        except OutOfTime:
            return

    @property
    def _is_shrunk(self) -> bool:
        """Whether shrinking has ended by itself."""
        return not self._is_cut_off and time.monotonic() < self._shrink_until

    def _minimise_while(self, fails: Callable[[Case], bool], keep: Callable[[Case], None] | None = None) -> Case:
        return minimise(
            self._now.case,
            fails,
            supports=self._now.declaration.supports,
            options=self._now.declaration.options,
            deadline=self._shrink_until,
            on_smaller=keep,
        )

    def _minimise_cheaply(self) -> None:
        """Shrink a case of a kernel that compiles for long: in compiled formats, then in the interpreter.

        What that comes to counts if the GPU shows it, too.
        """
        declaration, judge = self._now.declaration, self._judge
        if not judge.compiles_for_long(declaration):
            return
        self._minimise_while(
            lambda case: not judge.compiles_for_long(declaration, case) and self._fails_alike(case), self._keep
        )
        self._shows_there = self._shows_there or None  # the case is smaller now
        if self._shows_in_interpreter():
            smallest = self._minimise_while(self._fails_in_interpreter)
            if smallest != self._now.case and self._fails_alike(smallest):
                self._keep(smallest)

    def _shows_in_interpreter(self) -> bool:
        """Whether the case fails there, too, as it is when that first matters; no while that is still being started."""
        now = self._now
        if self._shows_there is None and (self._is_flaky or now.preceding):
            self._shows_there = False
        elif self._shows_there is None and self._judge.start_interpreter(now.declaration) is not None:
            shown = self._interpreted(now.case, self._retries.relations, patience="learned")
            self._shows_there = shown is not None and is_alike(now.failure, shown.failure)
        return bool(self._shows_there)

    def _fails_in_interpreter(self, case: Case) -> bool:
        """As `_fails_alike`. Raises OutOfTime."""
        if self._is_over():
            raise _CutOff
        failing = self._interpreted(case, self._retries.relations)
        return failing is not None and self._is_alike(failing)

    def _interpreted(self, case: Case, relations: Relations, *, patience: Patience = "short") -> FailingCase | None:
        """The failure that the interpreter shows of a case, if any. Raises OutOfTime."""
        asked = encode_case(case), relations
        if asked not in self._in_interpreter:
            declaration = self._now.declaration
            verdict = self._judge.in_interpreter(declaration, case, patience=patience, relations=relations)
            failure = None if verdict is None else verdict.failure
            self._in_interpreter[asked] = None if failure is None else self._now.with_case(case, failure)
        return self._in_interpreter[asked]

    def _shrink_preceding(self) -> None:
        """Fewer cases before the failing one, and such as are more like it."""
        if not self._now.preceding:
            return
        now = self._now

        def fails_after(preceding: Sequence[Case]) -> bool:
            if self._is_over():
                raise _CutOff
            failure = self._retries.after(preceding, now.case, patience="short")
            return failure is not None and now.with_case(now.case, failure).symptom == now.symptom

        fails = Allowance(_SEQUENCE_RUNS).limited(fails_after)
        kept = FailingCase(now.declaration, now.case, now.failure, fewer(now.preceding, fails))
        kept = FailingCase(now.declaration, now.case, now.failure, more_alike(kept, fails))
        if kept.preceding != now.preceding:
            self._step_to(kept)

    def _look_again(self, before: FailingCase) -> None:
        """Make sure that the case to be saved fails in a process of its own, or with a known rate; else go back."""
        if not self._is_flaky and not self._now.preceding:
            failure = self._retries.alone(self._now.case, afresh=True)
            shown = None if failure is None else self._now.with_case(self._now.case, failure)
            if shown is not None and shown.symptom != self._now.symptom and self._is_alike(shown):
                self._step_to(shown)  # what other calls had left hid it, as numbers do in what nobody has written
                if still_fails_afresh(shown, self._retries):
                    return
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
        self._shown = steps[: good + 1]
        self._step_to(steps[good])
        self._minimise_while(self._fails_alike, self._keep)

    def _fails_alike(self, case: Case) -> bool:
        """Whether ``case`` may stand for the failing one: it fails, and not of another bug that is known."""
        if self._is_over():
            raise _CutOff
        if self._hangs >= _MAX_HANGS_WHILE_SHRINKING:
            return False
        if self._judge.compiles_for_long(self._now.declaration, case):
            if not self._is_worth_compiling(case):
                return False
            began = time.monotonic()
            fails = self._fails_on_device(case)
            self._compilers_left_s -= time.monotonic() - began
            return fails
        return self._fails_on_device(case)

    def _is_worth_compiling(self, case: Case) -> bool:
        """Whether there is time for a case that has to be compiled, and the interpreter does not say that it passes."""
        if self._shows_in_interpreter() and not self._fails_in_interpreter(case):
            return False
        self._is_cut_off |= self._compilers_left_s <= 0
        return self._compilers_left_s > 0

    def _fails_on_device(self, case: Case) -> bool:
        preceding = tuple(self._followed(one, case) for one in self._now.preceding)
        for _ in range(self._tries):
            if not self._allowance.take():
                self._is_cut_off = True
                return False
            try:
                failure = self._retries.after(preceding, case, patience="short", afresh=self._afresh)
            except OutOfTime as cut:
                raise _CutOff from cut
            self._hangs += failure is not None and failure.oracle == HANG.name
            if failure is not None and self._is_alike(FailingCase(self._now.declaration, case, failure, preceding)):
                return True
        return False

    def _followed(self, earlier: Case, case: Case) -> Case:
        """A call before the failing one that differs from ``case`` as ``earlier`` does from the case as it is now.

        What a kernel keeps is often found by a shape that both have: one could not become smaller without the other.
        """
        declaration = self._now.declaration
        followed = with_fields_of(case, earlier, differing(self._now.case, earlier))
        is_one = followed is not None and supports_case(declaration.supports, declaration.options, followed)
        return followed if followed is not None and is_one else earlier

    def _is_alike(self, other: FailingCase) -> bool:
        now = self._now
        if not is_alike(now.failure, other.failure) or (self._is_flaky and other.symptom != now.symptom):
            return False
        if (bug := self._known.predicting(other)) is not None:
            if self._known.predicting(now) is not None:  # others have found it since
                raise _SameBug(bug)
            return False
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
        if failure is None or failure.oracle != HANG.name:
            return False
        self._step_to(self._now.with_case(self._now.case, failure))
        return True

    def _step_to(self, failing: FailingCase) -> None:
        """Go on with ``failing``, and tell of it."""
        self._now = failing
        self._shown.append(failing)
        self._send(Smaller(finding=self._finding, **written(failing.case, failing.told, failing.preceding)))

    def _step_back(self, before: FailingCase) -> None:
        """Return to an earlier step: later ones say nothing."""
        self._shown = []
        self._step_to(before)

    def _tell_rate(self, confirmation: Confirmation) -> None:
        self._send(Confirmed(finding=self._finding, failed=len(confirmation.failures), runs=confirmation.runs))

    def _close_as_new(self) -> None:
        is_complete = self._is_shrunk
        needed = self._needs()
        explanation = self._explanation()
        told = explanation.told or (self._now.failure if self._now.preceding else self._now.failure.undecided)
        told = msgspec.structs.replace(told, sources=explanation.sources or told.sources)
        if told != self._now.failure:
            self._step_to(self._now.with_case(self._now.case, told))
        is_declarable = self._passes_as_declared(needed)  # what is told may name a declaration
        self._send(
            Minimised(
                finding=self._finding,
                features=needed,
                bugs=self._learn(needed, self._tag, self._now),
                same_as=self._same_as,
                complete=is_complete,
                explanation=(*explanation.lines, *self._of_strides(needed)),
                blame=explanation.blame,
                weights=explanation.rows,
                declarable=is_declarable,
            )
        )

    def _of_strides(self, needed: frozenset[Feature]) -> tuple[str, ...]:
        """A line on the strides of K and V, if the case needs them to differ."""
        if KV_STRIDES_DIFFER not in needed:
            return ()
        case: Any = self._now.case
        either = needed.isdisjoint(map(strided, cache_names(case)))  # not asked in time, if one of them
        which = ", and fails whichever of them has the gaps" if either else ""
        return (f"it passes where K and V have the same strides{which}: is one addressed with the other's?",)

    def _explanation(self) -> Explanation:
        """The explanation of a case that always fails; empty for one that needs others before it."""
        now = self._now
        if self._is_flaky or now.preceding or is_leak(now.failure):
            return Explanation()
        return self._explained(now.declaration, now.case, now.failure)

    def _explained(self, declaration: Declaration, case: Case, failure: Failure) -> Explanation:
        """The explanation, which is made once of what is asked about several times in a row."""
        asked = declaration, case, failure
        if self._asked_about != asked:
            self._asked_about, self._answer = asked, Explanation()
            with contextlib.suppress(Unjudged):  # which has been said: the finding is told without an explanation
                self._answer = self._judge.explain(declaration, case, failure)
        return self._answer

    def _learn(self, needed: frozenset[Feature], finding: str, smallest: FailingCase | None = None) -> tuple[Bug, ...]:
        """Take later failures that show as this one did for the bug of ``finding``."""
        bugs = bugs_shown(self._shown, needed, smallest, flaky=self._is_flaky, finding=finding)
        for bug in bugs:
            self._known.add(bug)
            if not bug.flaky:
                self._deaths.learn(bug)
        return tuple(bugs)

    def _passes_as_declared(self, needed: frozenset[Feature]) -> bool:
        """Whether the declaration that would end the finding, if there is one, leaves out what fails and no less."""
        now = self._now
        finding = Finding("", now.declaration, now.case, now.failure, 0.0, shrunk_s=0.0, features=needed)
        if self._is_flaky or now.preceding or not (limits := needed_limits(finding)):
            return True
        supports = msgspec.structs.replace(now.declaration.supports, **limits)
        declared = FailingCase(msgspec.structs.replace(now.declaration, supports=supports), now.case, now.failure)
        case = nearest_permitted(declared)
        if case is None:
            return False
        try:
            failure = retries_of(declared, self._judge, self._deaths).alone(case, patience="short")
            if failure is not None and declared.with_case(case, failure).symptom == now.symptom:
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
        if limits.keys() == {"graph_replay"} or limits == {"strides": "serving"}:  # of these it says nothing else
            return True
        refuses = now.failure.oracle == EXCEPTION.name
        is_kept = False
        for kept, left_out in trial_of(now.declaration, limits, now.case):
            failure = self._failure_of(now.declaration, left_out)
            if failure is None or (refuses and not is_refusal(failure)):
                return False
            before = self._failure_of(declared, kept)
            is_kept |= before is None or (refuses and before.oracle != EXCEPTION.name)
        return is_kept

    def _has_no_natural_lse(self, declared: Declaration) -> bool:
        """Whether all rows of which the output is right have no log-sum-exp, or one to another base, as declared.

        In small cases of each shape, and in those that the campaign has come upon last.
        """
        natural = self._now.declaration
        alone = self._of_output(natural)
        is_told = False
        ordinary = next(points(natural), None)
        if ordinary is None:
            return False
        probes = ProbeCases(natural, ordinary)
        for case in (*probes.single_rows(), *probes.ordinary(), *self._judge.history.of(natural)[-_CASES_TRIED:]):
            if self._failure_of(alone, case) is not None:
                continue
            failure = self._failure_of(natural, case)
            if declared.supports.lse == "none" and (failure is None or failure.oracle != UNWRITTEN.name):
                return False
            if self._failure_of(declared, case) is not None:
                return False
            is_told |= failure is not None
        return is_told

    def _failure_of(self, declaration: Declaration, case: Case) -> Failure | None:
        failing = FailingCase(declaration, case, self._now.failure)
        return retries_of(failing, self._judge, self._deaths).alone(case, patience="short")
