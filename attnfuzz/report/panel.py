"""What a terminal shows of a campaign while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from attnfuzz.campaign.duration import format_duration
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import Statistics
from attnfuzz.report.headline import count, one_line
from attnfuzz.report.kernels import Shares, kernel_table

__all__ = ["panel"]

_MAX_FINDINGS = 4
_LINES_BESIDE_TABLE = 8
"""Of the panel, with the cursor's line and one of what scrolls above."""
_MAX_DEVICE_NAME = 12


def panel(
    statistics: Statistics, *, shrinking: Iterable[Finding], shares: Shares, width: int, height: int
) -> RenderableType:
    """Time, rates, kernels and the findings at work, in at most ``height`` lines of ``width`` columns."""
    at_work = list(shrinking)[-_MAX_FINDINGS:]
    rates = [Text(" · ").join(map(Text, facts)) for facts in (_effort(statistics), _insight(statistics, shares))]
    room = height - _LINES_BESIDE_TABLE - 2 * len(at_work) - sum(text.cell_len > width for text in rates)
    return Group(
        Text(),
        _clock(statistics, width),
        *rates,
        Text(),
        kernel_table(statistics, width=width, shares=shares, most_rows=max(2, room)),
        *(line for finding in at_work for line in _at_work(finding)),
    )


def _clock(statistics: Statistics, width: int) -> RenderableType:
    elapsed_s, left_s = statistics.elapsed_s(), statistics.remaining_s()
    row = Table.grid(padding=(0, 1))
    for _ in range(3):
        row.add_column(no_wrap=True)
    elapsed, left = format_duration(elapsed_s), f"{format_duration(left_s)} left"
    bar = ProgressBar(
        total=max(elapsed_s + left_s, 1e-9), completed=elapsed_s, width=max(8, width - len(elapsed) - len(left) - 2)
    )
    row.add_row(elapsed, bar, Text(left, "bold"))
    return row


def _effort(statistics: Statistics) -> Iterator[str]:
    rates = statistics.throughput.rates(statistics.elapsed_s())
    yield f"{statistics.cases:,} cases"
    yield f"{sum(rates.values()):,.1f} cases/s"
    if len(rates) > 1:
        yield from (f"{_device(device)} {rate:,.1f}/s" for device, rate in sorted(rates.items()))
    if statistics.restarts:
        yield f"{count(statistics.restarts, 'executor')} restarted"


def _insight(statistics: Statistics, shares: Mapping[str, float]) -> Iterator[str]:
    count_of = len(statistics.findings)
    yield f"{count_of} finding{'' if count_of == 1 else 's'}"
    ratio = max((kernel.max_error_ratio for kernel in statistics.kernels.values()), default=0.0)
    yield f"largest error/bound {ratio:.3g}"
    if shares:
        yield f"{100 * sum(shares.values()) / len(shares):.0f}% of feature pairs"
    if (compiling := statistics.share_compiling()) >= 0.005:
        yield f"{100 * compiling:.0f}% of the time compiling"


def _device(name: str) -> str:
    return f"GPU {name}" if name.isdecimal() else name[:_MAX_DEVICE_NAME]


def _at_work(finding: Finding) -> Iterator[Text]:
    """A finding that is being confirmed or shrunk: what it is, and the smallest case so far."""
    state = f"shrinking, {count(finding.steps, 'step')}" if finding.runs else "confirming"
    what = f"{finding.symptom.oracle}/{finding.symptom.kind}"
    title = Text.assemble((f"{state}: ", "yellow"), (what, "bold"), f" {finding.declaration.name}")
    for line in (title, Text(f"  {one_line(finding.case)}", style="dim")):
        line.no_wrap, line.overflow = True, "ellipsis"
        yield line
