"""Kernels and what they declare, for ``attnfuzz list``."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from attnfuzz.declaration import Declaration
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.supports import as_written

__all__ = ["print_kernels"]


def print_kernels(console: Console, declarations: Sequence[Declaration], *, verbose: bool) -> None:
    """One line a kernel; with ``verbose`` also every limit and promise of it."""
    if verbose:
        for declaration in declarations:
            _print_fully(console, declaration)
        return
    header = ("kernel", "problem", "options")
    rows = [header, *((one.target, str(one.problem), _options(one)) for one in declarations)]
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
        for name, value in msgspec.structs.asdict(part).items():
            shown = as_written(value) if name == "where" and value is not None else _value(value)
            console.print(Text(f"  {title}.{name}: {shown}"), soft_wrap=True)
    console.print()


def _options(declaration: Declaration) -> str:
    return "  ".join(f"{name}={'|'.join(map(str, choices))}" for name, choices in declaration.options.items())


def _value(value: object) -> str:
    if value is None:
        return "any"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
