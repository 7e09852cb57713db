"""Progress on a terminal: a panel that is redrawn in place, with events scrolling above it."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from attnfuzz.campaign.identity.finding import Finding
from attnfuzz.campaign.result import Statistics
from attnfuzz.report.headline import one_line
from attnfuzz.report.lines import LineReporter, describe
from attnfuzz.report.panel import panel

__all__ = ["LiveReporter"]

_REDRAW_EVERY_S = 0.25


class LiveReporter(LineReporter):
    """Redraws the panel four times a second."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._at_work: dict[str, Finding] = {}
        self._next = 0.0

    def started(self, statistics: Statistics) -> None:
        super().started(statistics)
        self._live.start()

    def progress(self, statistics: Statistics) -> None:
        if time.monotonic() < self._next:
            return
        size = self._console.size
        drawn = panel(
            statistics,
            shrinking=self._at_work.values(),
            width=size.width,
            height=size.height,
        )
        self._live.update(drawn, refresh=True)
        self._next = time.monotonic() + _REDRAW_EVERY_S

    def found(self, finding: Finding) -> None:
        self._at_work[finding.name] = finding
        self._brief(describe("found", finding), "yellow")
        self._brief(f"          {one_line(finding.case)}", "dim")

    def confirmed(self, finding: Finding) -> None:
        self._brief(describe("confirmed", finding), "red")

    def unconfirmed(self, finding: Finding) -> None:
        self._at_work.pop(finding.name, None)
        super().unconfirmed(finding)

    def known(self, finding: Finding) -> None:
        self._at_work.pop(finding.name, None)
        super().known(finding)

    def smaller(self, finding: Finding) -> None:
        return  # the panel shows it

    def shrunk(self, finding: Finding) -> None:
        self._at_work.pop(finding.name, None)
        super().shrunk(finding)

    def finished(self) -> None:
        self._live.stop()

    def _brief(self, text: str, style: str) -> None:
        self._console.print(Text(text, style=style), overflow="ellipsis", no_wrap=True)
