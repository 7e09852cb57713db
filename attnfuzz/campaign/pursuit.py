"""What is done with a failing case: report it at once, confirm it, shrink it."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from attnfuzz.campaign.judging import OutOfTime, TimedJudge
from attnfuzz.campaign.messages import Confirmed, Found, Minimised, Smaller, Unconfirmed
from attnfuzz.campaign.signature import KnownFindings, Signature, Symptom, case_features
from attnfuzz.declaration import Declaration
from attnfuzz.minimise import minimise
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import Case, encode_case

__all__ = ["Pursuit"]

_CONFIRMATIONS = {"hang": 1, "crash": 2}
_CONFIRMATIONS_OF_VALUES = 3
_TRIES_WHEN_FLAKY = 3
_MAX_HANGS_WHILE_SHRINKING = 25
_SHRINKING_LIMIT_S = 120.0
_HANG_WHILE_SHRINKING_S = 1.0


class Pursuit:
    """Follows one failure of one kernel under the name ``finding``; ``send`` tells the coordinator."""

    def __init__(
        self,
        finding: str,
        declaration: Declaration,
        case: Case,
        failure: Failure,
        *,
        judge: TimedJudge,
        known: KnownFindings,
        send: Callable[[msgspec.Struct], None],
        deadline: float,
    ) -> None:
        self._finding = finding
        self._declaration = declaration
        self._case = case
        self._failure = failure
        self._judge = judge
        self._known = known
        self._send = send
        self._deadline = deadline
        self._symptom = Symptom.of(declaration.target, failure)
        self._needed = case_features(declaration, case)  # a feature that any failing case lacks is not needed
        self._tries = 1
        self._hangs = 0

    def run(self) -> Signature | None:
        """The signature of the minimal case; None for a failure that never came back. Never raises OutOfTime."""
        self._send(
            Found(finding=self._finding, kernel=self._declaration.target, case=_raw(self._case), failure=self._failure)
        )
        try:
            if not self._confirm():
                return None
        except OutOfTime:  # it was seen, if only once: the coordinator reports it as not confirmed
            return None
        self._shrink()
        complete = time.monotonic() < self._deadline
        self._send(Minimised(finding=self._finding, features=self._needed, complete=complete))
        return Signature(self._symptom, self._needed)

    def _confirm(self) -> bool:
        """Run the case again in a fresh process: the old one may have been damaged by another case."""
        runs = _CONFIRMATIONS.get(self._failure.oracle, _CONFIRMATIONS_OF_VALUES)
        failed = same = 0
        for run in range(runs):
            afresh = run == 0 and self._failure.oracle not in _CONFIRMATIONS  # after those, every process is fresh
            failure = self._judge(self._declaration, self._case, patient=True, afresh=afresh).failure
            failed += failure is not None
            same += failure is not None and Symptom.of(self._declaration.target, failure) == self._symptom
        if not failed:
            self._send(Unconfirmed(finding=self._finding, runs=runs))
            return False
        self._tries = 1 if same == runs else _TRIES_WHEN_FLAKY
        self._send(Confirmed(finding=self._finding, failed=failed, runs=runs))
        return True

    def _shrink(self) -> None:
        last_hang_confirmed = self._case, self._failure
        minimise(
            self._case,
            self._fails_alike,
            supports=self._declaration.supports,
            options=self._declaration.options,
            deadline=min(self._deadline, time.monotonic() + _SHRINKING_LIMIT_S),
            on_smaller=self._keep,
        )
        if self._failure.oracle == "hang" and not self._still_hangs():
            self._case, self._failure = last_hang_confirmed
            self._needed = case_features(self._declaration, self._case)
            self._send(Smaller(finding=self._finding, case=_raw(self._case), failure=self._failure))

    def _fails_alike(self, case: Case) -> bool:
        """Whether ``case`` shows the same symptom and is not explained by another bug that is known."""
        if self._hangs >= _MAX_HANGS_WHILE_SHRINKING:
            return False
        for _ in range(self._tries):
            try:
                failure = self._judge(self._declaration, case, at_least_s=_HANG_WHILE_SHRINKING_S).failure
            except OutOfTime:
                return False
            self._hangs += failure is not None and failure.oracle == "hang"
            if failure is not None and Symptom.of(self._declaration.target, failure) == self._symptom:
                self._candidate_failure = failure
                return not self._known.explains(self._symptom, case_features(self._declaration, case))
        return False

    def _keep(self, case: Case) -> None:
        self._case, self._failure = case, self._candidate_failure
        self._needed &= case_features(self._declaration, case)
        self._send(Smaller(finding=self._finding, case=_raw(case), failure=self._failure))

    def _still_hangs(self) -> bool:
        """Whether the minimal case hangs for the longest time too, and is not just slower than others."""
        try:
            failure = self._judge(self._declaration, self._case, patient=True).failure
        except OutOfTime as cut:
            return cut.after_s > 0  # it ran until the end
        return failure is not None and failure.oracle == "hang"


def _raw(case: Case) -> msgspec.Raw:
    return msgspec.Raw(encode_case(case))
