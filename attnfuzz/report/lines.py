"""Progress as plain lines, for logs and pipes."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from attnfuzz.campaign.identity.finding import Finding
from attnfuzz.campaign.result import Statistics
from attnfuzz.campaign.stopping import format_duration
from attnfuzz.report.headline import count, found_so_far, one_line, restarts_of

__all__ = ["LineReporter", "describe", "status_line"]

_EVERY_S = 5.0
_SMALLER_EVERY_S = 2.0


def status_line(statistics: Statistics) -> str:
    """Where a campaign stands, in one line."""
    return f"{format_duration(statistics.elapsed_s())}: {', '.join(_facts(statistics))}"


def _facts(statistics: Statistics) -> Iterator[str]:
    ratio = max((kernel.max_error_ratio for kernel in statistics.kernels.values()), default=0.0)
    yield f"{count(statistics.cases, 'case')} ({statistics.cases / max(statistics.elapsed_s(), 1e-9):.1f}/s)"
    yield f"largest error/bound {ratio:.3g}"
    yield found_so_far(statistics)
    if (compiling := statistics.share_compiling()) >= 0.005:
        yield f"{100 * compiling:.0f}% of the time compiling"
    if statistics.restarts:
        yield restarts_of(statistics)
    yield f"{format_duration(statistics.remaining_s())} left"


def describe(what: str, finding: Finding, *, message: bool = True) -> str:
    """One line on a finding; without its ``message`` where that has just been said."""
    symptom = f"{finding.symptom.oracle}/{finding.failure.kind}"
    line = f"{what:<9} #{finding.tag} {finding.declaration.target} {symptom}"
    where = f" -> {finding.path}" if finding.path is not None else ""
    return f"{line}: {finding.failure.message}{where}" if message else f"{line}{where}"


class LineReporter:
    """One line every five seconds and one for every event; of a case that shrinks, one every other second."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.monotonic()
        self._last_smaller = 0.0

    def started(self, statistics: Statistics) -> None:
        why = f" ({statistics.why_so_many})" if statistics.why_so_many else ""
        self.note(
            f"searching {count(len(statistics.kernels), 'kernel')} on {statistics.device_name} for "
            f"{format_duration(statistics.remaining_s())} with "
            f"{count(statistics.workers, 'worker')}{why}, seed {statistics.seed}"
        )

    def progress(self, statistics: Statistics) -> None:
        if time.monotonic() - self._last >= _EVERY_S:
            self._last = time.monotonic()
            self.note(status_line(statistics))

    def found(self, finding: Finding) -> None:
        self.note(describe("found", finding))
        self.note(f"          {one_line(finding.case)}")

    def confirmed(self, finding: Finding) -> None:
        self.note(describe("confirmed", finding, message=False))

    def unconfirmed(self, finding: Finding) -> None:
        self.note(describe("once only", finding, message=False))

    def known(self, finding: Finding) -> None:
        self.note(describe("known", finding, message=False))

    def smaller(self, finding: Finding) -> None:
        if time.monotonic() - self._last_smaller >= _SMALLER_EVERY_S:
            self._last_smaller = time.monotonic()
            steps = count(finding.steps, "step")
            self.note(f"shrinking #{finding.tag} {finding.declaration.target}, {steps}: {one_line(finding.case)}")

    def shrunk(self, finding: Finding) -> None:
        self.note(describe("shrunk" if finding.shrunk_s is not None else "cut off", finding))

    def finished(self) -> None:
        return

    def note(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()
