"""Judging one case in a worker: journalled first, within a time limit that is learned, and never past the deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Protocol

from attnfuzz.campaign.journal import Journal
from attnfuzz.campaign.timeouts import AdaptiveTimeout
from attnfuzz.declaration import Declaration
from attnfuzz.execution.outcomes import ServiceError
from attnfuzz.oracles.verdict import Verdict
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.limits import CaseTooLarge

__all__ = ["Judge", "OutOfTime", "Patience", "TimedJudge", "Unjudged"]

Patience = Literal["learned", "short", "longest"]

_MAX_COMPLAINTS = 5
"""Errors of the framework that are lived with, each on its own case, before one ends the worker."""
_GRACE_S = 1.0
"""How far past the deadline a case may run on before it is given up."""


class Judge(Protocol):
    """Runs a case on a kernel in isolation; a hang lasts ``timeout_s`` and is a failure of the oracle ``"hang"``.

    ``afresh`` runs it in a process that has not run any case before.
    """

    def __call__(self, declaration: Declaration, case: Case, *, timeout_s: float, afresh: bool = False) -> Verdict: ...


class OutOfTime(Exception):  # noqa: N818 - control flow, like StopIteration
    """The deadline passed before the case was judged; ``after_s`` is how long it had been running."""

    def __init__(self, after_s: float) -> None:
        super().__init__(after_s)
        self.after_s = after_s


class Unjudged(Exception):  # noqa: N818 - control flow, like StopIteration
    """The framework failed on the case, and has said so: nothing is known of the kernel."""


class TimedJudge:
    """A ``judge`` under the campaign's deadline, with one adaptive timeout for each kernel."""

    def __init__(
        self,
        judge: Judge,
        *,
        deadline: float,
        longest_s: float,
        journal: Journal,
        complain: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._judge = judge
        self._deadline = deadline
        self._longest_s = longest_s
        self._journal = journal
        self._complain = complain
        self._complaints_left = _MAX_COMPLAINTS
        self._clock = clock
        self._timeouts: dict[str, AdaptiveTimeout] = {}

    def __call__(
        self,
        declaration: Declaration,
        case: Case,
        *,
        patience: Patience = "learned",
        afresh: bool = False,
    ) -> Verdict:
        """The verdict on ``case``, in a fresh process if ``afresh``.

        ``patience`` says how long it may take: what has been learned, a time for trying things out or the longest time.
        Raises OutOfTime when the deadline cuts the case short, and Unjudged where the framework fails on it.
        """
        timeout = self._timeouts.setdefault(declaration.target, AdaptiveTimeout(self._longest_s))
        limit_s = self._longest_s if patience == "longest" else timeout.limit_s(short=patience == "short")
        started = self._clock()
        remaining_s = self._deadline + _GRACE_S - started
        if remaining_s <= 0:
            raise OutOfTime(0.0)
        self._journal.write(declaration, case)
        verdict = self._ask(declaration, case, min(limit_s, remaining_s), afresh=afresh)
        hung = verdict.failure is not None and verdict.failure.oracle == "hang"
        if hung and remaining_s < limit_s:
            raise OutOfTime(self._clock() - started)
        if not hung:
            timeout.record(self._clock() - started)
        return verdict

    def _ask(self, declaration: Declaration, case: Case, timeout_s: float, *, afresh: bool) -> Verdict:
        try:
            return self._judge(declaration, case, timeout_s=timeout_s, afresh=afresh)
        except (ServiceError, CaseTooLarge) as error:
            self._complaints_left -= 1
            if self._complaints_left < 0:
                raise
            self._complain(f"{declaration.target} on {encode_case(case).decode()} cannot be judged: {error}")
            raise Unjudged from error
