"""What a terminal shows of a campaign while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from attnfuzz.campaign.draw.coverage import pairs_met
from attnfuzz.campaign.identity.finding import Finding
from attnfuzz.campaign.result import Statistics
from attnfuzz.campaign.stopping import format_duration
from attnfuzz.report.headline import count, found_so_far, one_line, restarts_of
from attnfuzz.report.kernels import kernel_table

__all__ = ["panel"]

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
    yield found_so_far(statistics)
    ratio = max((kernel.max_error_ratio for kernel in statistics.kernels.values()), default=0.0)
    yield f"largest error/bound {ratio:.3g}"
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
    what = f"{finding.symptom.oracle}/{finding.symptom.kind}"
    title = Text.assemble((f"{state}: ", "yellow"), (what, "bold"), f" #{finding.tag} {finding.declaration.name}")
    for line in (title, Text(f"  {one_line(finding.case)}", style="dim")):
        line.no_wrap, line.overflow = True, "ellipsis"
        yield line
