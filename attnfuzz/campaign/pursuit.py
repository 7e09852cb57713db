"""What is done with a failing case: report it at once, confirm it, shrink it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from attnfuzz.campaign.aspects import SILENT_ORACLES, aspects
from attnfuzz.campaign.judging import OutOfTime, Patience, TimedJudge, Unjudged
from attnfuzz.campaign.messages import Confirmed, Duplicate, Found, Minimised, Smaller, Unconfirmed
from attnfuzz.campaign.siblings import strides_swapped, without
from attnfuzz.campaign.signature import KnownFindings, Signature, Symptom, case_features
from attnfuzz.declaration import Declaration
from attnfuzz.minimise import minimise
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.features import KV_STRIDES_DIFFER

__all__ = ["Pursuit", "Suspect"]

_CONFIRMATIONS = {"hang": 1, "crash": 2}
_CONFIRMATIONS_OF_VALUES = 3
_TRIES_WHEN_FLAKY = 3
_MAX_HANGS_WHILE_SHRINKING = 25
_SHRINKING_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Suspect:
    """A case that failed once."""

    declaration: Declaration
    case: Case
    failure: Failure

    @property
    def symptom(self) -> Symptom:
        """Kernel, oracle and kind."""
        return Symptom.of(self.declaration.target, self.failure)

    @property
    def features(self) -> frozenset[str]:
        """What makes the case more than the simplest one."""
        return case_features(self.declaration, self.case)

    def as_(self, case: Case, failure: Failure) -> Suspect:
        """Another case of the same kernel."""
        return Suspect(self.declaration, case, failure)


class _SameBug(Exception):  # noqa: N818 - control flow, like StopIteration
    """The suspect has come down to a bug that is known."""


class _CutOff(Exception):  # noqa: N818 - as above
    """The campaign has ended while the suspect was being shrunk."""


class Pursuit:
    """Follows one suspect under the name ``finding``; ``send`` tells the coordinator, ``known`` learns what it is.

    ``is_over`` is asked before each case of shrinking whether the campaign has ended.
    """

    def __init__(
        self,
        finding: str,
        suspect: Suspect,
        *,
        judge: TimedJudge,
        known: KnownFindings,
        send: Callable[[msgspec.Struct], None],
        is_over: Callable[[], bool],
        deadline: float,
    ) -> None:
        self._finding = finding
        self._first = self._now = suspect
        self._judge = judge
        self._known = known
        self._send = send
        self._is_over = is_over
        self._shrink_until = deadline
        self._needed = suspect.features  # a feature that any failing case lacks is not needed
        self._symptoms = [suspect.symptom]
        self._flaky = False
        self._hangs = 0
        self._failing: Suspect | None = None

    def run(self) -> bool:
        """Whether the suspect is a bug, known or new; False if it never failed again or time ran out before that."""
        first = self._first
        self._send(
            Found(
                finding=self._finding,
                kernel=first.declaration.target,
                case=_raw(first.case),
                failure=first.failure,
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
            self._step_past_known()
            self._shrink()
        except _SameBug:
            self._close_as_known()
        else:
            self._look_beside()
            self._close_as_new()
        return True

    def _confirm(self) -> bool:
        """Run the case again in a fresh process: the old one may have been damaged by another case."""
        suspect = self._first
        runs = _CONFIRMATIONS.get(suspect.failure.oracle, _CONFIRMATIONS_OF_VALUES)
        failures = []
        for run in range(runs):
            afresh = run == 0 and suspect.failure.oracle not in _CONFIRMATIONS  # after those, every process is fresh
            failure = self._failure_of(suspect.case, patience="longest", afresh=afresh)
            failures += [failure] if failure is not None else []
        if not failures:
            self._send(Unconfirmed(finding=self._finding, runs=runs))
            return False
        alike = [failure for failure in failures if suspect.as_(suspect.case, failure).symptom == suspect.symptom]
        self._flaky = len(alike) < runs
        if self._flaky:
            self._look_at_flakiness(failures)
        self._send(Confirmed(finding=self._finding, failed=len(failures), runs=runs))
        return True

    def _look_at_flakiness(self, failures: list[Failure]) -> None:
        """Runs that differ are one bug, whatever other oracles make of them; the determinism oracle names it best."""
        kernel = self._first.declaration.target
        if self._first.failure.oracle not in _CONFIRMATIONS:
            known = self._known.flaky_one(kernel, self._needed)
            if known is not None:
                self._needed = known.features
                raise _SameBug
        named = next((failure for failure in failures if failure.oracle == "determinism"), None)
        if named is not None and self._first.failure.oracle not in _CONFIRMATIONS:
            self._step_to(self._first.as_(self._first.case, named))

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
        if self._flaky or symptom.oracle not in oracles:
            return []
        mine = aspects(self._now.features)
        known = (aspects(signature.features) for signature in self._known.of_oracles(symptom.kernel, oracles))
        return sorted({next(iter(its)) for its in known if len(its) == 1 and its <= mine})

    def _failing_one(self, case: Case) -> Suspect | None:
        failure = self._failure_of(case, patience="short")
        return None if failure is None else self._now.as_(case, failure)

    def _start_again(self, suspect: Suspect) -> None:
        """Take up ``suspect`` instead."""
        self._needed = suspect.features
        self._symptoms = []
        self._step_to(suspect)

    def _look_beside(self) -> None:
        """Find out whether the strides of K or V matter, or that they differ: the smallest case cannot tell."""
        if KV_STRIDES_DIFFER not in self._needed:
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
        self._shrink_until = min(self._shrink_until, time.monotonic() + _SHRINKING_LIMIT_S)
        try:
            minimise(
                before.case,
                self._fails_alike,
                supports=before.declaration.supports,
                options=before.declaration.options,
                deadline=self._shrink_until,
                on_smaller=self._keep,
            )
        except _CutOff:
            self._shrink_until = -math.inf
        if self._now is not before and before.failure.oracle == "hang" and not self._still_hangs():
            self._step_to(before)
            self._needed = before.features

    def _fails_alike(self, case: Case) -> bool:
        """Whether ``case`` shows the same symptom, or one that it may become, and is not another bug that is known."""
        if self._is_over():
            raise _CutOff
        if self._hangs >= _MAX_HANGS_WHILE_SHRINKING:
            return False
        for _ in range(_TRIES_WHEN_FLAKY if self._flaky else 1):
            try:
                failure = self._failure_of(case, patience="short")
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
            if becomes:
                self._needed &= other.features
                raise _SameBug
            return False
        self._failing = other
        return True

    def _keep(self, case: Case) -> None:
        if self._failing is None or self._failing.case != case:
            raise RuntimeError(f"minimise() kept a case that was not judged last: {encode_case(case).decode()}")
        self._step_to(self._failing)

    def _step_to(self, suspect: Suspect) -> None:
        self._now = suspect
        self._needed &= suspect.features
        if suspect.symptom not in self._symptoms:
            self._symptoms.append(suspect.symptom)
        self._send(Smaller(finding=self._finding, case=_raw(suspect.case), failure=suspect.failure))

    def _still_hangs(self) -> bool:
        """Whether the minimal case hangs for the longest time too, as far as there is time to wait for that."""
        try:
            failure = self._failure_of(self._now.case, patience="longest")
        except OutOfTime:
            return True
        if failure is None or failure.oracle != "hang":
            return False
        self._step_to(self._now.as_(self._now.case, failure))
        return True

    def _failure_of(self, case: Case, *, patience: Patience, afresh: bool = False) -> Failure | None:
        """What an oracle objects to. Raises OutOfTime."""
        try:
            return self._judge(self._first.declaration, case, patience=patience, afresh=afresh).failure
        except Unjudged:
            return None

    def _close_as_new(self) -> None:
        if not aspects(self._needed) and aspects(self._now.features):
            self._needed = self._now.features  # it slipped from one bug to another, which must not explain both
        self._send(
            Minimised(
                finding=self._finding,
                features=self._needed,
                shown_as=self._learn(),
                complete=time.monotonic() < self._shrink_until,
                flaky=self._flaky,
            )
        )

    def _close_as_known(self) -> None:
        shown_as = self._learn()
        self._send(Duplicate(finding=self._finding, features=self._needed, shown_as=shown_as, flaky=self._flaky))

    def _learn(self) -> tuple[tuple[str, str], ...]:
        """Take later failures with any symptom of this bug for it; the symptoms."""
        for symptom in self._symptoms:
            self._known.add(Signature(symptom, self._needed), flaky=self._flaky)
        return tuple((symptom.oracle, symptom.kind) for symptom in self._symptoms)


def _raw(case: Case) -> msgspec.Raw:
    return msgspec.Raw(encode_case(case))
