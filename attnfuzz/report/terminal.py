"""Output of a campaign: at its end the table of kernels, each finding and the verdict; a reporter for before."""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from attnfuzz.campaign.environments import name_of
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import CampaignResult, Reporter, Statistics
from attnfuzz.campaign.statistics import KernelStatistics, pairs_met
from attnfuzz.campaign.stopping import format_duration
from attnfuzz.isolation.pythons import Python
from attnfuzz.report.findings import (
    CLOSE_TO_THE_BOUND,
    ToldFinding,
    count,
    heading_of,
    restarts_of,
    told_findings,
    what_was_found,
)
from attnfuzz.report.remarks import more_time, not_all_judged, remarks_on
from attnfuzz.untrusted_text import only_printable

_WIDTH_OF_FILES = 140
"""Columns where the output is no terminal: tables need some, and text is not wrapped there."""
_MOST_DETAILS = 3


def make_console() -> Console:
    """A console on stdout that never wraps or colours what goes into a file.

    What the output's encoding cannot say becomes a question mark: a message of somebody's kernel must not end a
    campaign.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    return _LastingConsole(width=width, highlight=False, markup=False, emoji=False)


class _LastingConsole(Console):
    """Shows control characters that somebody's text holds as escapes: a terminal would obey them.

    Falls silent when the reader of a pipe is gone, where rich ends the process: files have yet to be written.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The parts of what is printed; those that draw, such as moves of the cursor, are rich's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=only_printable(segment.text))

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # or the interpreter's last flush fails
        os.close(nowhere)


def make_reporter(console: Console, *, quiet: bool) -> Reporter:
    """A live panel on a terminal, plain lines where nothing can be redrawn, nothing if ``quiet``."""
    if quiet:
        return Reporter()
    if console.is_terminal and not console.is_dumb_terminal:
        from attnfuzz.report.progress import LiveReporter

        return LiveReporter(console)
    from attnfuzz.report.progress import LineReporter

    return LineReporter(console)


def print_result(console: Console, result: CampaignResult) -> None:
    """The table, each finding with the command that replays it, and the verdict in one sentence."""
    console.print()
    console.print(kernel_table(result.statistics, width=console.width))
    console.print(Text(_costs(result.statistics), style="dim"), soft_wrap=True)
    before = ""
    for told in told_findings(result):
        console.print()
        heading = heading_of(told.finding, result.statistics)
        if heading != before:
            console.print(Text(heading, style="bold yellow"), soft_wrap=True)
            console.print()
        before = heading
        for line in _finding_lines(told):
            console.print(line, soft_wrap=True)
    remarks = remarks_on(result)
    for remark in remarks:
        if remark.weight != "unjudged":
            console.print()
            console.print(Text("\n   ".join((remark.text, *remark.details[:_MOST_DETAILS])), "yellow"), soft_wrap=True)
    console.print()
    for remark in remarks:
        if remark.weight == "unjudged":
            console.print(Text(remark.text, style="bold yellow"), soft_wrap=True)
    console.print(Text(verdict_sentence(result), style="bold red" if result.fails else "bold"), soft_wrap=True)
    if (step := _next_step(result)) is not None:
        console.print(step, soft_wrap=True)


def _next_step(result: CampaignResult) -> str | None:
    """The next step where nothing at all was found; None where there is something to look at, or to mend first."""
    is_over = result.stop_reason == "budget" and result.statistics.cases
    if not is_over or result.findings or any(remark.weight != "note" for remark in remarks_on(result)):
        return None
    if all(":" not in target for target in result.statistics.kernels):
        return "these kernels come with attnfuzz; next, yours: attnfuzz explore path/to/your_kernel.py"
    return "next: a larger --budget searches on, and attnfuzz ci searches each commit"


def _costs(statistics: Statistics) -> str:
    return (
        f"{100 * statistics.share_compiling():.0f}% of the time compiling, "
        f"{restarts_of(statistics)}; pairs: pairs of input features that cases had"
    )


def verdict_sentence(result: CampaignResult) -> str:
    """The verdict of a campaign in one sentence, with the effort behind it."""
    statistics = result.statistics
    rate = statistics.cases / max(result.elapsed_s, 1e-9)
    effort = (
        f"{count(statistics.cases, 'case')} (of {count(len(statistics.kernels), 'kernel')} in "
        f"{format_duration(result.elapsed_s)} on {statistics.device_name}, {rate:.1f} cases/s with "
        f"{count(statistics.workers, 'worker')}, seed {statistics.seed})"
    )
    why = {"interrupted": "interrupted: ", "workers_lost": "every worker was lost: "}.get(result.stop_reason, "")
    if not statistics.cases and not result.findings:
        return f"{why}no case was judged in {format_duration(result.elapsed_s)}{more_time(result)}"
    found = what_was_found(result)
    rest = "; not all was judged, as told above" if not result.findings and not_all_judged(result) else ""
    return f"{why}{found}{',' if ',' in found or ';' in found else ''} in {effort}{rest}"


def _finding_lines(told: ToldFinding) -> Iterator[RenderableType]:
    finding = told.finding
    title = Text(f"{told.number}. {told.target}  ", style="bold")
    title.append(told.title, style="bold red" if told.disposition == "counts" else "bold")
    if told.status:
        title.append(f"  ({told.status})", style="bold yellow")
    yield title
    yield from (Text(f"   {line}") for line in (told.message, told.case, *told.lines))
    yield from (Text(f"   {remark}", style="dim") for remark in _remarks(told) if remark)
    if told.command:
        yield Text(f"   saved in {finding.path}")
        yield Text(f"   {told.command}", style="cyan")
    else:
        yield Text("   not saved; its regression file would hold:")
        yield Text(told.saved)
    if told.others:
        yield Text(f"   {told.shown_by}; the others:")
    for other in told.others:
        yield Text(f"      {other.target}  {other.title}")
        yield Text(f"      {other.command}", style="cyan") if other.command else Text(other.saved)


def _remarks(told: ToldFinding) -> Iterator[str]:
    finding = told.finding
    yield f"#{finding.tag}: first seen after {format_duration(finding.first_seen_s)}, {_how_small(finding)}"
    yield from (told.certainty, told.comparison)
    if finding.known_as is not None:
        yield "already known: the file was there before and is unchanged"
    if finding.replaces is not None:
        yield f"replaces {finding.replaces}, the same bug in a larger case"


def _how_small(finding: Finding) -> str:
    if finding.shrunk_s is not None:
        return f"shrunk in {count(finding.steps, 'step')}"
    return "shrinking was cut off" if finding.steps or not finding.is_flaky else "not shrunk"


_Row = tuple[KernelStatistics, int]
"""A kernel, and how many findings count."""


@dataclass(frozen=True, slots=True)
class _Column:
    """Shown where the terminal is ``from_width`` wide, and not ``to_width``."""

    title: str
    cell: Callable[[KernelStatistics, int], Text]
    from_width: int = 0
    to_width: int = 1 << 30
    justify: JustifyMethod = "right"


def kernel_table(statistics: Statistics, *, width: int, most_rows: int | None = None) -> Table:
    """One row a kernel: cases, cases per second of one worker, largest error over bound, pairs of features, findings.

    Where there are more kernels than ``most_rows``, those with findings and those closest to their bounds are shown.
    """
    columns = [column for column in _COLUMNS if column.from_width <= width < column.to_width]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        least = None if column.justify == "left" else len(column.title)  # names give way to numbers
        table.add_column(column.title, justify=column.justify, no_wrap=True, min_width=least)
    found = Counter(
        one.declaration.target for one in statistics.findings if statistics.disposition(one) in ("counts", "known")
    )
    rows = [(kernel, found[target]) for target, kernel in statistics.kernels.items()]
    shown = _most_important(rows, most_rows)
    for row in shown:
        table.add_row(*(column.cell(*row) for column in columns))
    if len(shown) < len(rows):
        table.add_row(Text(f"... and {len(rows) - len(shown)} more", style="dim"))
    return table


def _most_important(rows: list[_Row], most: int | None) -> list[_Row]:
    if most is None or len(rows) <= most:
        return rows
    ranked = sorted(rows, key=lambda row: (-row[1], -row[0].max_error_ratio))[: max(1, most - 1)]
    return [row for row in rows if row in ranked]


def _ratio(kernel: KernelStatistics, found: int) -> Text:
    ratio = kernel.max_error_ratio
    style = "bold red" if ratio > 1 else "yellow" if ratio > CLOSE_TO_THE_BOUND else ""
    return Text(f"{ratio:.3g}" if kernel.cases else "-", style=style)


_COLUMNS = (
    _Column("kernel", lambda kernel, _: Text(kernel.declaration.name), justify="left"),
    _Column("problem", lambda kernel, _: Text(str(kernel.declaration.problem)), from_width=74, justify="left"),
    _Column("cases", lambda kernel, _: Text(str(kernel.cases))),
    _Column(
        "cases/s per worker",
        lambda kernel, _: Text(f"{kernel.cases / kernel.seconds:.1f}" if kernel.seconds else "-"),
        from_width=104,
    ),
    _Column("largest error/bound", _ratio, from_width=84),
    _Column("err/bound", _ratio, to_width=84),
    _Column("pairs", lambda kernel, _: Text(f"{pairs_met(kernel.coverage):,}" if kernel.coverage else "-")),
    _Column("findings", lambda _, found: Text(str(found), style="bold red" if found else "")),
)


def print_environment(console: Console, python: Python | None) -> None:
    """In which environment runs what comes next, unless it is the driver's."""
    if python is not None:
        console.print(Text(f"in {name_of(python)}", style="bold"), soft_wrap=True)
