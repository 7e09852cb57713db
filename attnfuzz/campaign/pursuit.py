"""What is done with a failing case: report it at once, confirm it, shrink it."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from attnfuzz.campaign.aspects import SILENT_ORACLES, aspects
from attnfuzz.campaign.beneath_rounding import is_sight_of_known, plainly_wrong, shows_in_rounding
from attnfuzz.campaign.confirmation import Confirmation, confirm, ever_fails_afresh, rate_of, still_fails_afresh
from attnfuzz.campaign.explained import explanation_of
from attnfuzz.campaign.judging import OutOfTime, TimedJudge
from attnfuzz.campaign.known_deaths import KnownDeaths
from attnfuzz.campaign.leaks import LeakTrials, leak_behind, trials_of
from attnfuzz.campaign.messages import Confirmed, Duplicate, Found, Minimised, Smaller, Unconfirmed
from attnfuzz.campaign.preceding import fewer, simpler
from attnfuzz.campaign.siblings import strides_swapped, without
from attnfuzz.campaign.signature import NEEDS_PRECEDING, KnownFindings, Signature, case_features
from attnfuzz.campaign.suspect import Suspect
from attnfuzz.minimise import minimise
from attnfuzz.oracles.verdict import ends_process
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.features import KV_STRIDES_DIFFER

__all__ = ["Pursuit"]

_MAX_TRIES = 10
_MISSED = 0.1
"""How often a smaller case that is as flaky may be taken for one that passes."""
_MAX_HANGS_WHILE_SHRINKING = 25
_SHRINKING_LIMIT_S = 60.0
_SHRINKING_DEATHS_LIMIT_S = 25.0


class _SameBug(Exception):  # noqa: N818 - control flow, like StopIteration
    """The suspect has come down to a bug that is known."""


class _CutOff(Exception):  # noqa: N818 - as above
    """The campaign has ended while the suspect was being shrunk."""


class Pursuit:
    """Follows one suspect under the name ``finding``; ``send`` tells the coordinator.

    ``known`` learns what it is, ``deaths`` which cases crash or hang of it.

    ``is_over`` is asked before each case of shrinking whether the campaign has ended.
    """

    def __init__(
        self,
        finding: str,
        suspect: Suspect,
        *,
        judge: TimedJudge,
        known: KnownFindings,
        deaths: KnownDeaths | None = None,
        send: Callable[[msgspec.Struct], None],
        is_over: Callable[[], bool],
        deadline: float,
    ) -> None:
        self._finding = finding
        self._first = self._now = suspect
        self._known = known
        self._deaths = KnownDeaths() if deaths is None else deaths
        self._judge = judge
        self._trials = trials_of(suspect, judge, self._deaths)
        self._send = send
        self._is_over = is_over
        self._shrink_until = deadline
        self._needed = suspect.features  # a feature that any failing case lacks is not needed
        self._symptoms = [suspect.symptom]
        self._flaky = False
        self._tries = 1
        self._afresh = False
        self._steps: list[Suspect] = []
        self._hangs = 0
        self._failing: Suspect | None = None

    def run(self) -> bool:
        """Whether the suspect is a bug, known or new; False if it never failed again or time ran out before that."""
        first = self._first
        if self._is_known_to_need_others():
            return True
        self._send(
            Found(
                finding=self._finding,
                kernel=first.declaration.target,
                case=_raw(first.case),
                failure=first.failure,
                preceding=tuple(map(_raw, first.preceding)),
            )
        )
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
            self._step_past_known()
            self._shrink()
        except _SameBug:
            self._close_as_known()
        else:
            self._look_beside()
            self._close_as_new()
        return True

    def _is_known_to_need_others(self) -> bool:
        """A symptom that is known to need other cases, on a case that ran after some and does not fail alone."""
        if not self._first.preceding or not self._known.needs_preceding(self._first.symptom):
            return False
        try:
            return self._trials.alone(self._first.case, afresh=True) is None
        except OutOfTime:
            return True

    def _confirm(self) -> bool:
        """Tell how it comes back; False if it does not."""
        leak = leak_behind(self._first, self._judge)
        if leak is not None:
            self._take_for(leak)
        confirmation = confirm(self._first, self._trials)
        if not confirmation.failures:
            self._send(Unconfirmed(finding=self._finding, runs=confirmation.runs))
            return False
        self._flaky = confirmation.is_flaky
        needs_others = bool(confirmation.suspect.preceding)
        self._first = self._now = confirmation.suspect
        self._needed = confirmation.suspect.features
        if needs_others:
            self._step_to(confirmation.suspect)
        elif self._flaky:
            self._look_at_flakiness(confirmation)
        self._tell_rate(confirmation)
        return True

    def _take_for(self, leak: Suspect) -> None:
        """Go on with what the death came of."""
        if self._known.explains(leak.symptom, leak.features):
            raise _SameBug
        self._first = leak
        self._trials = LeakTrials(self._judge, leak.declaration)
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

    def _tell_rate(self, confirmation: Confirmation) -> None:
        self._send(Confirmed(finding=self._finding, failed=len(confirmation.failures), runs=confirmation.runs))

    def _look_beneath_rounding(self) -> None:
        """Where bits differ, a plainly wrong number may be at work; known or not, that is what to tell."""
        if self._flaky or self._now.preceding or not shows_in_rounding(self._now):
            return
        try:
            if is_sight_of_known(self._now, self._known, self._failing_one):
                raise _SameBug
            plain = plainly_wrong(self._now, self._failing_one)
        except OutOfTime:
            return
        if plain is not None and not self._known.explains(plain.symptom, plain.features):
            self._start_again(plain)

    def _step_past_known(self) -> None:
        """Another symptom of a known bug is gone when what that bug is about is gone; what is not, is another bug."""
        for aspect in self._suspected_aspects():
            siblings = without(aspect, self._first.declaration, self._now.case)
            if not siblings:
                continue
            try:
                failing = [other for other in map(self._failing_one, siblings) if other is not None]
            except OutOfTime:
                return
            if any(other.symptom == self._now.symptom for other in failing):
                continue
            news = [other for other in failing if not self._known.explains(other.symptom, other.features)]
            if not news:
                self._needed &= self._known.least_needed(self._now.symptom, aspect) or self._needed
                raise _SameBug
            self._start_again(news[0])
            return

    def _suspected_aspects(self) -> list[str]:
        """Aspects that alone make a known bug of the same kernel which the suspect may be."""
        symptom, oracles = self._now.symptom, SILENT_ORACLES
        if self._flaky or self._now.preceding or symptom.oracle not in oracles:
            return []
        mine = aspects(self._now.features)
        known = (aspects(signature.features) for signature in self._known.of_oracles(symptom.kernel, oracles))
        return sorted({next(iter(its)) for its in known if len(its) == 1 and its <= mine})

    def _failing_one(self, case: Case) -> Suspect | None:
        failure = self._trials.alone(case, patience="short")
        return None if failure is None else self._now.as_(case, failure)

    def _start_again(self, suspect: Suspect) -> None:
        """Take up ``suspect`` instead."""
        self._needed = suspect.features
        self._symptoms = []
        self._step_to(suspect)

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

    def _shrink(self) -> None:
        before = self._now
        deadly = ends_process(before.failure)
        limit_s = _SHRINKING_DEATHS_LIMIT_S if deadly else _SHRINKING_LIMIT_S
        self._shrink_until = min(self._shrink_until, time.monotonic() + limit_s)
        try:
            self._minimise()
            self._shrink_preceding()
            if before.failure.oracle == "hang":
                self._check_hang(before)
            elif self._flaky or not still_fails_afresh(self._now, self._trials):
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
        now = Suspect(now.declaration, now.case, now.failure, kept)
        self._step_to(Suspect(now.declaration, now.case, now.failure, simpler(now, self._fails_after, until=until)))

    def _fails_after(self, preceding: Sequence[Case]) -> bool:
        if self._is_over():
            raise _CutOff
        failure = self._trials.after(preceding, self._now.case, patience="short")
        return failure is not None and self._now.as_(self._now.case, failure).symptom == self._now.symptom

    def _check_hang(self, before: Suspect) -> None:
        if self._now is not before and not self._still_hangs():
            self._step_back(before)

    def _look_again(self, before: Suspect) -> None:
        """What is saved must fail in a process of its own, or with a rate that is known; or else what it came from."""
        if not self._flaky and not ever_fails_afresh(self._now, self._trials):
            self._shrink_afresh(before)
            if still_fails_afresh(self._now, self._trials):
                return
        rate = rate_of(self._now, self._trials)
        if not rate.failures and self._now is not before:
            self._step_back(before)
            rate = rate_of(before, self._trials)
        if rate.failures:
            self._flaky = rate.is_flaky
            self._tell_rate(rate)

    def _shrink_afresh(self, before: Suspect) -> None:
        """Go on from the last step that fails in a fresh process: later ones needed what the cases tried had left."""
        steps = [before, *self._steps]
        good = bisect.bisect_left(steps, 1, lo=1, key=lambda step: not ever_fails_afresh(step, self._trials)) - 1
        self._afresh = True
        self._needed = frozenset.intersection(*(step.features for step in steps[: good + 1]))
        self._step_to(steps[good])
        self._minimise()

    def _step_back(self, before: Suspect) -> None:
        self._step_to(before)
        self._needed = before.features

    def _fails_alike(self, case: Case) -> bool:
        """Whether ``case`` shows the same symptom, or one that it may become, and is not another bug that is known."""
        if self._is_over():
            raise _CutOff
        if self._hangs >= _MAX_HANGS_WHILE_SHRINKING:
            return False
        for _ in range(self._tries):
            try:
                failure = self._trials.after(self._now.preceding, case, patience="short", afresh=self._afresh)
            except OutOfTime as cut:
                raise _CutOff from cut
            self._hangs += failure is not None and failure.oracle == "hang"
            if failure is not None and self._is_alike(self._now.as_(case, failure)):
                return True
        return False

    def _is_alike(self, other: Suspect) -> bool:
        same = other.symptom == self._now.symptom
        becomes = not same and self._now.symptom.may_become(other.symptom)
        if not same and not becomes:
            return False
        if self._known.explains(other.symptom, other.features):
            if becomes or self._known.explains(self._now.symptom, self._now.features):  # others have found it since
                self._needed &= other.features
                raise _SameBug
            return False
        self._failing = other
        return True

    def _keep(self, case: Case) -> None:
        if self._failing is None or self._failing.case != case:
            raise RuntimeError(f"minimise() kept a case that was not judged last: {encode_case(case).decode()}")
        self._steps.append(self._failing)
        self._step_to(self._failing)

    def _step_to(self, suspect: Suspect) -> None:
        self._now = suspect
        self._needed &= suspect.features
        if suspect.symptom not in self._symptoms:
            self._symptoms.append(suspect.symptom)
        self._send(
            Smaller(
                finding=self._finding,
                case=_raw(suspect.case),
                failure=suspect.told,
                preceding=tuple(map(_raw, suspect.preceding)),
            )
        )

    def _still_hangs(self) -> bool:
        """Whether the minimal case hangs for longer than it had while shrinking, too."""
        failure = self._trials.after(self._now.preceding, self._now.case, patience="longest")
        if failure is None or failure.oracle != "hang":
            return False
        self._step_to(self._now.as_(self._now.case, failure))
        return True

    def _close_as_new(self) -> None:
        if not aspects(self._needed) and aspects(self._now.features):
            self._needed = self._now.features  # it slipped from one bug to another, which must not explain both
        if self._now.preceding:
            self._needed |= {NEEDS_PRECEDING}
        self._send(
            Minimised(
                finding=self._finding,
                features=self._needed,
                shown_as=self._learn(),
                complete=time.monotonic() < self._shrink_until,
                flaky=self._flaky,
                explanation=() if self._flaky else explanation_of(self._now, self._judge),
            )
        )

    def _close_as_known(self) -> None:
        shown_as = self._learn()
        self._send(Duplicate(finding=self._finding, features=self._needed, shown_as=shown_as, flaky=self._flaky))

    def _learn(self) -> tuple[tuple[str, str], ...]:
        """Take later failures with any symptom of this bug for it; the symptoms."""
        for symptom in self._symptoms:
            signature = Signature(symptom, self._needed)
            self._known.add(signature, flaky=self._flaky)
            if not self._flaky:
                self._deaths.learn(signature)
        return tuple((symptom.oracle, symptom.kind) for symptom in self._symptoms)


def _raw(case: Case) -> msgspec.Raw:
    return msgspec.Raw(encode_case(case))
