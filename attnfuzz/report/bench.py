"""Tables of ``attnfuzz bench``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnfuzz.bench.campaigns import Measured
from attnfuzz.bench.endurance import Endurance
from attnfuzz.bench.setting import Setting
from attnfuzz.bench.throughput import Row

__all__ = ["print_endurance", "print_row", "print_setting", "print_throughput"]


def print_setting(console: Console, setting: Setting) -> None:
    """What is measured, and where."""
    console.print(Text(f"{len(setting.kernels)} kernels on {setting.device_name}, {setting.cores} CPU cores"))


def print_row(console: Console, row: Row) -> None:
    """One measurement, as soon as there is one."""
    console.print(Text(f"{row.name}: {row.rate:.1f} cases/s"))
    console.file.flush()


def print_throughput(console: Console, rows: Sequence[Row]) -> None:
    """All measurements beside the first one, and where the time of the campaigns went."""
    table = _table("measurement", "cases/s", "over the first", "cases", "found")
    for row in rows:
        cases = "" if row.measured is None else str(sum(row.measured.cases.values()))
        found = "" if row.measured is None else str(_counting(row.measured))
        table.add_row(
            row.name, f"{row.rate:.1f}", f"{row.rate / rows[0].rate:.2f}" if rows[0].rate else "-", cases, found
        )
    console.print()
    console.print(table)
    for row in rows:
        if row.measured is not None:
            console.print()
            console.print(Text(row.name, style="bold"))
            console.print(_shares(row.measured))


def _counting(measured: Measured) -> int:
    """Findings that are not possibly out of contract."""
    result = measured.result
    return sum(result.statistics.standing(finding) == "counts" for finding in result.findings)


def print_endurance(console: Console, endured: Endurance) -> None:
    """What was found on the hostile kernels, what they cost the others, and the memory over time."""
    table = _table("hostile kernel", "found")
    for name, found in endured.found.items():
        table.add_row(name, ", ".join(found) or "nothing")
    console.print(table)
    together = endured.together.rate_of(endured.targets)
    console.print(
        Text(
            f"the other kernels: {endured.alone.rate:.1f} cases/s alone, {together:.1f} beside the hostile ones at the "
            f"same time ({endured.rate_kept:.0%})"
        )
    )
    for stray in endured.strays:
        console.print(Text(f"found on a healthy kernel: {stray}", style="bold red"))
    console.print(Text(f"memory of the processes beside them (MiB), in tenths of the time: {_tenths(endured)}"))


def _tenths(endured: Endurance) -> str:
    """The median of the samples in each tenth of the time: single samples may catch the leaking kernel at its worst."""
    if not endured.memory:
        return "not sampled"
    last = endured.memory[-1].seconds
    groups: list[list[int]] = [[] for _ in range(10)]
    for sample in endured.memory:
        groups[min(9, int(10 * sample.seconds / last))].append(sample.nbytes) if last else None
    return " ".join(f"{sorted(group)[len(group) // 2] / 2**20:.0f}" if group else "-" for group in groups)


def _shares(measured: Measured) -> Table:
    """Where the time of the workers went, as shares and per case."""
    statistics = measured.result.statistics
    kernels = statistics.kernels.values()
    cases = max(1, statistics.cases)
    total = statistics.workers * measured.campaign_s
    parts = {
        "compiling kernels": sum(one.compile_s for one in kernels),
        "running kernels": sum(one.kernel_s for one in kernels),
        "reference and bounds": sum(one.reference_s for one in kernels),
        "harness: building inputs": sum(one.build_s for one in kernels),
    }
    judging = sum(one.seconds for one in kernels)
    parts["harness: comparing, messages"] = judging - sum(parts.values())
    parts["harness: drawing and the rest"] = max(0.0, total - judging)  # what a batch took is known at its end
    table = _table("where a worker's time goes", "share", "ms per case")
    for name, seconds in parts.items():
        table.add_row(name, f"{seconds / total:.1%}" if total else "-", f"{1000 * seconds / cases:.3f}")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table
