"""Declarations of kernels: ``attnfuzz list`` prints them, and ``attnfuzz declare`` what was found out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import CampaignResult
from attnfuzz.declaration import Absent, Declaration
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.supports import as_call, as_written
from attnfuzz.report.findings import count, in_order, one_line, remedy_lines


def print_kernels(
    console: Console, declarations: Sequence[Declaration], absent: Sequence[Absent], *, verbose: bool
) -> None:
    """One line a kernel; with ``verbose`` also every limit and promise of it. Of an absent one why, and its needs."""
    header = ("kernel", "problem", "options")
    rows = [header]
    if verbose:
        for declaration in declarations:
            _print_fully(console, declaration)
        if not absent:
            return
    else:
        rows += [(one.target, str(one.problem), _options(one)) for one in declarations]
    rows += [(one.name, one.problem, f"{one.why}; it needs {', '.join(one.needs)}") for one in absent]
    wide, less_wide, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    for row in rows:  # no table of rich: that cuts what is longer than a terminal, or 80 columns of a pipe
        line = f"{row[0]:<{wide}}  {row[1]:<{less_wide}}  {row[2]}".rstrip()
        console.print(Text(line, style="bold" if row is header else ""), soft_wrap=True)


def _print_fully(console: Console, declaration: Declaration) -> None:
    console.print(Text(f"{declaration.target}  ({declaration.problem})", style="bold"), soft_wrap=True)
    console.print(Text(f"  options: {_options(declaration) or 'none'}"), soft_wrap=True)
    parts: tuple[tuple[str, msgspec.Struct], ...] = (
        ("supports", declaration.supports), ("numerics", declaration.numerics)
    )  # fmt: skip
    if isinstance(declaration.problem, OpenProblem):
        for name, field in declaration.problem.fields.items():
            console.print(Text(f"  {name}: {field}"), soft_wrap=True)
        parts = ()
    for title, part in parts:
        for name in (one for one in part.__struct_fields__ if one != "promised"):
            value = getattr(part, name)
            shown = as_written(value) if name == "where" and value is not None else _value(value)
            console.print(Text(f"  {title}.{name}: {shown}"), soft_wrap=True)
    console.print()


def _options(declaration: Declaration) -> str:
    return "  ".join(f"{name}={'|'.join(map(str, choices))}" for name, choices in declaration.options.items())


def _value(value: object) -> str:
    if value is None:
        return "any"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def print_declared(console: Console, result: CampaignResult) -> None:
    """The declarations of all kernels that were searched."""
    for number, target in enumerate(result.statistics.kernels):
        if number:
            console.print()
        for line in _lines(result, target):
            console.print(line, soft_wrap=True)


def _lines(result: CampaignResult, target: str) -> Iterator[Text]:
    kernel = result.statistics.kernels[target]
    yield Text(f"{target}:", style="bold")
    inferred = next((one for one in result.inferred if one.target == target), None)
    supports = kernel.declaration.supports if inferred is None else inferred.declarable
    yield Text(f"    supports=attnfuzz.{as_call('Supports', supports.declared())},", style="green")
    numerics = kernel.declaration.numerics if inferred is None else inferred.kept
    if declared := numerics.declared():
        yield Text(f"    numerics=attnfuzz.{as_call('Numerics', declared)},", style="green")
    for left_out in inferred.settled if inferred is not None else ():
        yield Text(f"  {left_out}: {left_out.said}" if left_out.said else f"  {left_out}", style="dim")
    if inferred is None or not inferred.settled:
        yield Text("  nothing else had to be left out", style="dim")
    for stricter in inferred.stricter if inferred is not None else ():
        yield Text(f"  {stricter}", style="dim")
    found = [finding for finding in in_order(result) if finding.declaration.target == target]
    bugs = [finding for finding in found if result.statistics.disposition(finding) == "counts"]
    if bugs:
        yield Text(f"  within it, {count(len(bugs), 'bug')}, which no declaration ends:", style="bold red")
    else:
        nothing = "no bug" if found else "nothing"
        yield Text(f"  within it, {nothing} was found in {count(kernel.cases, 'case')}")
    for finding in bugs:
        yield from _finding_lines(finding)
    if questions := [finding for finding in found if result.statistics.disposition(finding) == "question"]:
        yield Text(f"  {count(len(questions), 'question')}, which a further declaration answers:", style="yellow")
    for finding in questions:
        yield from _finding_lines(finding, further=True)
    if outside := [finding for finding in found if result.statistics.disposition(finding) == "outside"]:
        yield Text(f"  and {len(outside)} possibly out of contract, which a further declaration ends:", style="yellow")
    for finding in outside:
        yield from _finding_lines(finding, further=True)
    if found:
        yield Text(f"  to look into {'it' if len(found) == 1 else 'them'}: attnfuzz explore {target}", style="cyan")


def _finding_lines(finding: Finding, *, further: bool = False) -> Iterator[Text]:
    yield Text(f"  - {finding.failure.message}")
    yield Text(f"    {one_line(finding.case)}", style="dim")
    if further and finding.remedy is not None:
        yield from (Text(f"    {line}") for line in remedy_lines(finding.remedy.declared(), finding.case))
