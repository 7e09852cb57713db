"""Progress on a terminal: a table that is redrawn in place, with events scrolling above it."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import Statistics
from attnfuzz.report.lines import LineReporter, describe, status_line
from attnfuzz.report.terminal import kernel_table

__all__ = ["LiveReporter"]

_REDRAWS_PER_SECOND = 4


class LiveReporter(LineReporter):
    """Redraws the table of kernels four times a second."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, refresh_per_second=_REDRAWS_PER_SECOND, transient=True)

    def started(self, statistics: Statistics) -> None:
        super().started(statistics)
        self._live.start()

    def progress(self, statistics: Statistics) -> None:
        self._live.update(_panel(statistics))

    def found(self, finding: Finding) -> None:
        self._console.print(Text(describe("found", finding), style="yellow"), overflow="ellipsis", no_wrap=True)

    def confirmed(self, finding: Finding) -> None:
        self._console.print(Text(describe("confirmed", finding), style="red"), overflow="ellipsis", no_wrap=True)

    def finished(self) -> None:
        self._live.stop()


def _panel(statistics: Statistics) -> RenderableType:
    return Group("", kernel_table(statistics), "", Text(status_line(statistics), style="dim"))
