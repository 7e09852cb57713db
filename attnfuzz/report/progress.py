"""Output of a campaign while it runs: plain lines for logs and pipes, or a panel that a terminal redraws in place."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import FindingEvent, Reporter, Statistics
from attnfuzz.campaign.statistics import pairs_met
from attnfuzz.campaign.stopping import format_duration
from attnfuzz.report.findings import count, found_so_far, largest_ratio, one_line, restarts_of
from attnfuzz.report.terminal import kernel_table

_EVERY_S = 5.0
_SMALLER_EVERY_S = 2.0
_STAGE_EVERY_S = 0.5


def status_line(statistics: Statistics) -> str:
    """Where a campaign stands, in one line."""
    return f"{format_duration(statistics.elapsed_s())}: {', '.join(_facts(statistics))}"


def _facts(statistics: Statistics) -> Iterator[str]:
    yield from _waited_for(statistics)
    yield f"{count(statistics.cases, 'case')} ({statistics.cases / max(statistics.elapsed_s(), 1e-9):.1f}/s)"
    yield f"largest error/bound {largest_ratio(statistics):.3g}"
    yield found_so_far(statistics)
    if (compiling := statistics.share_compiling()) >= 0.005:
        yield f"{100 * compiling:.0f}% of the time compiling"
    if statistics.restarts:
        yield restarts_of(statistics)
    yield f"{format_duration(statistics.remaining_s())} left"


def _waited_for(statistics: Statistics) -> Iterator[str]:
    """The reason why some workers, or some kernels, have no cases yet."""
    if statistics.asking:
        takes = "it takes" if statistics.asking == 1 else "they take"
        yield f"asking {count(statistics.asking, 'kernel')} what {takes}"
    if statistics.compiling:
        yield f"{count(statistics.compiling, 'worker')} compiling"


def describe(what: str, finding: Finding, *, message: bool = True) -> str:
    """One line on a finding; without its ``message`` where that has just been said."""
    line = f"{what:<9} #{finding.tag} {finding.declaration.target} {finding.failure.name}"
    where = f" -> {finding.path}" if finding.path is not None else ""
    return f"{line}: {finding.failure.message}{where}" if message else f"{line}{where}"


class LineReporter(Reporter):
    """One line every five seconds and one for every event; of a case that shrinks, one every other second."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.monotonic()
        self._last_smaller = 0.0
        self._waited_for: tuple[float, str] = (0.0, "")

    def waiting(self, what: str) -> None:
        said_at, said = self._waited_for
        if what != said and time.monotonic() - said_at >= _STAGE_EVERY_S:
            self._waited_for = time.monotonic(), what
            self.note(what)

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

    def finding(self, event: FindingEvent, finding: Finding) -> None:
        if event == "found":
            self.note(describe("found", finding))
            self.note(f"          {one_line(finding.case)}")
        elif event == "shrunk":
            self.note(describe("shrunk" if finding.shrunk_s is not None else "cut off", finding))
        elif event == "known":  # its file, which may have been told, is gone
            other = f": the same bug as #{finding.same_as}" if finding.same_as else ""
            self.note(f"known bug #{finding.tag} {finding.declaration.target} {finding.failure.name}{other}")
        elif event != "smaller":
            self.note(describe("once only" if event == "unconfirmed" else event, finding, message=False))
        elif time.monotonic() - self._last_smaller >= _SMALLER_EVERY_S:
            self._last_smaller = time.monotonic()
            steps = count(finding.steps, "step")
            self.note(f"shrinking #{finding.tag} {finding.declaration.target}, {steps}: {one_line(finding.case)}")

    def note(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()


_MAX_FINDINGS = 4
_OTHER_LINES = 7
"""Blank ones, the clock, the head of the table, the cursor's, and one of what scrolls above."""
_BETWEEN = " · "
_MAX_DEVICE_NAME = 12


def panel(statistics: Statistics, *, shrinking: Iterable[Finding], width: int, height: int) -> RenderableType:
    """Time, rates, kernels and the findings at work, in at most ``height`` lines of ``width`` columns."""
    facts = [*_wrapped(_effort(statistics), width), *_wrapped(_insight(statistics), width)]
    at_work = [line for finding in list(shrinking)[-_MAX_FINDINGS:] for line in _at_work(finding)]
    room = height - _OTHER_LINES - len(facts) - len(at_work)
    return Group(
        Text(),
        _clock(statistics, width),
        *facts,
        Text(),
        kernel_table(statistics, width=width, most_rows=max(2, room)),
        *([Text(), *at_work] if at_work else []),
    )


def _wrapped(facts: Iterable[str], width: int) -> Iterator[Text]:
    """Lines of facts, broken between and not within them."""
    line = ""
    for fact in facts:
        longer = f"{line}{_BETWEEN}{fact}" if line else fact
        if line and cell_len(longer) > width:
            yield Text(line)
            longer = fact
        line = longer
    yield Text(line)


def _clock(statistics: Statistics, width: int) -> RenderableType:
    elapsed_s, left_s = statistics.elapsed_s(), statistics.remaining_s()
    row = Table.grid(padding=(0, 1))
    for _ in range(3):
        row.add_column(no_wrap=True)
    elapsed, left = format_duration(elapsed_s), f"{format_duration(left_s)} left"
    bar = ProgressBar(
        total=max(elapsed_s + left_s, 1e-9),
        completed=elapsed_s,
        width=max(8, width - len(elapsed) - len(left) - 2),
        complete_style="cyan",
        finished_style="cyan",
    )
    row.add_row(elapsed, bar, Text(left, "bold"))
    return row


def _effort(statistics: Statistics) -> Iterator[str]:
    rates = statistics.throughput.rates(statistics.elapsed_s())
    yield f"{statistics.cases:,} cases"
    yield f"{_rate(sum(rates.values()))} cases/s"
    if len(rates) > 1:
        yield from (f"{_device(device)} {_rate(rate)}/s" for device, rate in sorted(rates.items()))
    if statistics.restarts:
        yield restarts_of(statistics)


def _insight(statistics: Statistics) -> Iterator[str]:
    yield from _waited_for(statistics)
    yield found_so_far(statistics)
    yield f"largest error/bound {largest_ratio(statistics):.3g}"
    if pairs := sum(pairs_met(kernel.coverage) for kernel in statistics.kernels.values()):
        yield f"{pairs:,} feature pairs"
    if (compiling := statistics.share_compiling()) >= 0.005:
        yield f"{100 * compiling:.0f}% compiling"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _device(name: str) -> str:
    return f"GPU {name}" if name.isdecimal() else name[:_MAX_DEVICE_NAME]


def _at_work(finding: Finding) -> Iterator[Text]:
    """A finding that is being confirmed or shrunk: what it is, and the smallest case so far."""
    state = f"shrinking, {count(finding.steps, 'step')}" if finding.runs else "confirming"
    title = Text.assemble(
        (f"{state}: ", "yellow"), (finding.failure.name, "bold"), f" #{finding.tag} {finding.declaration.name}"
    )
    for line in (title, Text(f"  {one_line(finding.case)}", style="dim")):
        line.no_wrap, line.overflow = True, "ellipsis"
        yield line


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

    def finding(self, event: FindingEvent, finding: Finding) -> None:
        if event == "found":
            self._at_work[finding.name] = finding
            self._brief(describe("found", finding), "yellow")
            self._brief(f"          {one_line(finding.case)}", "dim")
        elif event == "confirmed":
            self._brief(describe("confirmed", finding), "red")
        elif event != "smaller":  # which the panel shows
            self._at_work.pop(finding.name, None)
            super().finding(event, finding)

    def finished(self) -> None:
        self._live.stop()

    def _brief(self, text: str, style: str) -> None:
        self._console.print(Text(text, style=style), overflow="ellipsis", no_wrap=True)
