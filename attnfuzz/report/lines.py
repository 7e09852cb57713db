"""Progress as plain lines, for logs and pipes."""

from __future__ import annotations

import time

from rich.console import Console
from rich.text import Text

from attnfuzz.campaign.duration import format_duration
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import Statistics

__all__ = ["LineReporter", "describe", "status_line"]

_EVERY_S = 5.0


def status_line(statistics: Statistics) -> str:
    """Where a campaign stands, in one line."""
    elapsed_s = statistics.elapsed_s()
    ratio = max((kernel.max_error_ratio for kernel in statistics.kernels.values()), default=0.0)
    return (
        f"{format_duration(elapsed_s)}: {statistics.cases} cases ({statistics.cases / max(elapsed_s, 1e-9):.1f}/s), "
        f"largest error/bound {ratio:.3g}, {len(statistics.findings)} findings, "
        f"{format_duration(statistics.remaining_s())} left"
    )


def describe(what: str, finding: Finding) -> str:
    """One line on a finding."""
    line = f"{what:<9} {finding.declaration.target} {finding.signature.symptom.oracle}/{finding.failure.kind}"
    where = f" -> {finding.path}" if finding.path is not None else ""
    return f"{line}: {finding.failure.message}{where}"


class LineReporter:
    """One line every five seconds and one for every event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.monotonic()

    def started(self, statistics: Statistics) -> None:
        count = len(statistics.kernels)
        self.note(
            f"searching {count} kernel{'s' if count > 1 else ''} on {statistics.device_name} for "
            f"{format_duration(statistics.deadline - statistics.started)} with {statistics.workers} "
            f"worker{'s' if statistics.workers > 1 else ''}, seed {statistics.seed}"
        )

    def progress(self, statistics: Statistics) -> None:
        if time.monotonic() - self._last >= _EVERY_S:
            self._last = time.monotonic()
            self.note(status_line(statistics))

    def found(self, finding: Finding) -> None:
        self.note(describe("found", finding))

    def confirmed(self, finding: Finding) -> None:
        self.note(describe("confirmed", finding))

    def unconfirmed(self, finding: Finding) -> None:
        self.note(describe("not again", finding))

    def known(self, finding: Finding) -> None:
        self.note(describe("known", finding))

    def smaller(self, finding: Finding) -> None:
        return

    def shrunk(self, finding: Finding) -> None:
        self.note(describe("shrunk" if finding.shrunk_s is not None else "cut off", finding))

    def finished(self) -> None:
        return

    def note(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()
