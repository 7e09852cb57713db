"""What a worker has done on each kernel, told to the coordinator a few times a second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from attnfuzz.campaign.messages import Progress
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Verdict
from attnfuzz.problems.cases import Case

__all__ = ["Tally"]

_REPORT_EVERY_S = 0.3


@dataclass(slots=True)
class _Counts:
    cases: int = 0
    seconds: float = 0.0
    known: int = 0
    skipped: int = 0
    max_error_ratio: float = 0.0


class Tally:
    """Counts per kernel; ``send`` gets what was added since the last report."""

    def __init__(self, send: Callable[[Progress], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._unsent: dict[str, _Counts] = {}
        self._totals: dict[str, _Counts] = {}
        self._death_seconds: dict[str, float] = {}
        self._behind_seconds: dict[str, float] = {}
        self._last_report = clock()

    def cases(self, kernel: str) -> int:
        """Cases judged on ``kernel`` so far."""
        return self._totals[kernel].cases if kernel in self._totals else 0

    def share_of_known_deaths(self, kernel: str) -> float:
        """Part of the judging time on ``kernel`` that went into crashes and hangs that were known."""
        total = self._totals[kernel].seconds if kernel in self._totals else 0.0
        return self._death_seconds.get(kernel, 0.0) / total if total else 0.0

    def share_behind_known(self, kernel: str) -> float:
        """Part of the time on ``kernel`` that went into looking behind known bugs."""
        behind = self._behind_seconds.get(kernel, 0.0)
        total = behind + (self._totals[kernel].seconds if kernel in self._totals else 0.0)
        return behind / total if total else 0.0

    def looked_behind_known(self, kernel: str, seconds: float) -> None:
        """Count time spent on relatives of a known failure."""
        self._behind_seconds[kernel] = self._behind_seconds.get(kernel, 0.0) + seconds

    def judged(self, declaration: Declaration, case: Case, seconds: float, verdict: Verdict) -> None:
        """Count a case. A ratio that is not finite (a wrong NaN) is a finding and no measure of accuracy."""
        for counts in self._both(declaration.target):
            counts.cases += 1
            counts.seconds += seconds
            if math.isfinite(verdict.error_ratio):
                counts.max_error_ratio = max(counts.max_error_ratio, verdict.error_ratio)
        if self._clock() - self._last_report >= _REPORT_EVERY_S:
            self.flush()

    def known(self, kernel: str, death_seconds: float) -> None:
        """Count a failure that an earlier finding explains, and the time it cost if it was a crash or a hang."""
        for counts in self._both(kernel):
            counts.known += 1
        self._death_seconds[kernel] = self._death_seconds.get(kernel, 0.0) + death_seconds

    def skipped(self, kernel: str) -> None:
        """Count a case that was not run because it would crash or hang as an earlier one did."""
        for counts in self._both(kernel):
            counts.skipped += 1

    def flush(self) -> None:
        """Report what has not been reported."""
        unsent, self._unsent = self._unsent, {}
        self._last_report = self._clock()
        for kernel, counts in unsent.items():
            self._send(
                Progress(
                    kernel=kernel,
                    cases=counts.cases,
                    seconds=counts.seconds,
                    known=counts.known,
                    skipped=counts.skipped,
                    max_error_ratio=counts.max_error_ratio,
                )
            )

    def _both(self, kernel: str) -> tuple[_Counts, _Counts]:
        return self._unsent.setdefault(kernel, _Counts()), self._totals.setdefault(kernel, _Counts())
