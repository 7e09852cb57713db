"""The table of kernels, as wide as there is room for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from attnfuzz.campaign.coverage import coverage_of
from attnfuzz.campaign.result import KernelStatistics, Statistics

__all__ = ["Shares", "all_shares", "kernel_table", "next_share"]

Shares = dict[str, float]
"""By kernel, the part of the possible pairs of features that its cases have had."""

_CLOSE_TO_THE_BOUND = 0.9


@dataclass(frozen=True, slots=True)
class _Column:
    """Shown where the terminal is ``from_width`` wide, and not ``to_width``."""

    title: str
    cell: Callable[[_Row], Text]
    from_width: int = 0
    to_width: int = 1 << 30
    justify: JustifyMethod = "right"


@dataclass(frozen=True, slots=True)
class _Row:
    kernel: KernelStatistics
    share: float | None
    findings: int


def kernel_table(
    statistics: Statistics, *, width: int, shares: Shares | None = None, most_rows: int | None = None
) -> Table:
    """One row a kernel: cases, cases per second of one worker, largest error over bound, findings.

    Where there are more kernels than ``most_rows``, those with findings and those closest to their bounds are shown.
    """
    columns = [column for column in _COLUMNS if column.from_width <= width < column.to_width]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        least = None if column.justify == "left" else len(column.title)  # names give way to numbers
        table.add_column(column.title, justify=column.justify, no_wrap=True, min_width=least)
    rows = [_row(statistics, target, shares or {}) for target in statistics.kernels]
    shown = _most_important(rows, most_rows)
    for row in shown:
        table.add_row(*(column.cell(row) for column in columns))
    if len(shown) < len(rows):
        table.add_row(Text(f"... and {len(rows) - len(shown)} more", style="dim"))
    return table


def next_share(statistics: Statistics, shares: Shares) -> None:
    """Bring the share of one kernel up to date, the one whose turn it is: finding them all out takes a while."""
    waiting = [target for target, kernel in statistics.kernels.items() if kernel.coverage and target not in shares]
    target = waiting[0] if waiting else next(iter(shares), None)
    if target is not None:
        shares.pop(target, None)  # to the end of the queue
        shares[target] = _share(statistics, target)


def all_shares(statistics: Statistics) -> Shares:
    """The share of every kernel that had a case."""
    return {target: _share(statistics, target) for target, kernel in statistics.kernels.items() if kernel.coverage}


def _share(statistics: Statistics, target: str) -> float:
    kernel = statistics.kernels[target]
    return coverage_of(kernel.declaration, kernel.coverage, device=statistics.device).share


def _row(statistics: Statistics, target: str, shares: Shares) -> _Row:
    told = (finding for finding in statistics.findings if statistics.in_contract(finding))
    findings = sum(finding.declaration.target == target for finding in told)
    return _Row(statistics.kernels[target], shares.get(target), findings)


def _most_important(rows: list[_Row], most: int | None) -> list[_Row]:
    if most is None or len(rows) <= most:
        return rows
    ranked = sorted(rows, key=lambda row: (-row.findings, -row.kernel.max_error_ratio))[: max(1, most - 1)]
    return [row for row in rows if row in ranked]


def _name(row: _Row) -> Text:
    return Text(row.kernel.declaration.name)


def _problem(row: _Row) -> Text:
    return Text(str(row.kernel.declaration.problem))


def _cases(row: _Row) -> Text:
    return Text(str(row.kernel.cases))


def _rate(row: _Row) -> Text:
    return Text(f"{row.kernel.cases / row.kernel.seconds:.1f}" if row.kernel.seconds else "-")


def _ratio(row: _Row) -> Text:
    ratio = row.kernel.max_error_ratio
    style = "bold red" if ratio > 1 else "yellow" if ratio > _CLOSE_TO_THE_BOUND else ""
    return Text(f"{ratio:.3g}" if row.kernel.cases else "-", style=style)


def _pairs(row: _Row) -> Text:
    return Text("-" if row.share is None else f"{100 * row.share:.0f}%")


def _findings(row: _Row) -> Text:
    return Text(str(row.findings), style="bold red" if row.findings else "")


_COLUMNS = (
    _Column("kernel", _name, justify="left"),
    _Column("problem", _problem, from_width=74, justify="left"),
    _Column("cases", _cases),
    _Column("cases/s per worker", _rate, from_width=104),
    _Column("largest error/bound", _ratio, from_width=84),
    _Column("err/bound", _ratio, to_width=84),
    _Column("pairs", _pairs),
    _Column("findings", _findings),
)
