"""What ``attnfuzz merge`` prints: one row for each bug, and what it amounts to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnfuzz.campaign.saved.merging import PASSING, Checked, Kept, SavedBug
from attnfuzz.report.headline import count

__all__ = ["Merged", "print_merged"]

_WIDTH_OF_FILES = 1000
"""Columns where the output is no terminal: paths are copied from there, so they must not be broken."""
_STYLES = {"fails": "bold red", "fails again": "bold red", "not verified": "yellow"}


@dataclass(frozen=True, slots=True)
class Merged:
    """A bug, the case that stands for it, and where that lies."""

    bug: SavedBug
    checked: Checked
    kept: Kept

    @property
    def is_fixed(self) -> bool:
        """Whether the case is marked as one that must pass."""
        return self.checked.saved.regression.status == "fixed"

    @property
    def counts(self) -> bool:
        """Whether there is a bug, for all that is known."""
        return self.checked.outcome == "fails" or (self.checked.outcome == "unverified" and not self.is_fixed)

    def outcome(self) -> str:
        """What came of running the case."""
        names = {"fails": "fails again" if self.is_fixed else "fails", "passes": "passes", "unverified": "not verified"}
        return names[self.checked.outcome]


def print_merged(
    console: Console, rows: Sequence[Merged], *, files: int, folders: int, output: Path, verified: bool
) -> None:
    """The table, why cases were not verified, and the total. ``files`` were read from ``folders``."""
    if rows:
        if not console.is_terminal:
            console.width = max(console.width, _WIDTH_OF_FILES)
        console.print(_table(rows))
    for row in rows:
        for line in _remarks(row):
            console.print(Text(line), soft_wrap=True)
    style = "bold red" if any(row.counts for row in rows) else "bold"
    console.print(Text(_total(rows, files, folders, output, verified), style=style), soft_wrap=True)


def _table(rows: Sequence[Merged]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("kernel", overflow="fold")
    table.add_column("finding", overflow="fold")
    table.add_column("files", justify="right")
    table.add_column("run here", no_wrap=True)
    table.add_column("kept as", overflow="fold")
    for row in rows:
        outcome = row.outcome()
        table.add_row(
            Text(row.checked.saved.regression.kernel),
            Text(str(row.bug.signature) + (" (fixed)" if row.is_fixed else "")),
            str(len(row.bug.files)),
            Text(outcome, style=_STYLES.get(outcome, "green")),
            Text(str(row.kept.path)),
        )
    return table


def _remarks(row: Merged) -> Iterator[str]:
    name = row.kept.path.name
    if row.checked.reason:
        yield f"{name} was not verified: {row.checked.reason}"
    for path in row.kept.replaced:
        yield f"{name} replaces {path.name}, the same bug in a larger case"
    if row.checked.outcome == "passes" and not row.is_fixed and row.kept.path.parent.name != PASSING:
        yield f'{name} was there before and passes now: set its "status" to "fixed"'


def _total(rows: Sequence[Merged], files: int, folders: int, output: Path, verified: bool) -> str:
    bugs = [row for row in rows if row.counts]
    aside = sum(row.kept.path.parent.name == PASSING for row in rows)
    text = f"{count(files, 'file')} from {count(folders, 'place')}: {count(len(bugs), 'bug')} in {output}"
    for outcome in ("fails", "fails again", "not verified"):
        number = sum(row.outcome() == outcome for row in bugs)
        verb = outcome.replace("fails", "fail") if number > 1 else outcome
        text += f"; {number} {verb}" if number else ""
    text += f"; put aside in {output / PASSING}, passing now: {aside}" if aside else ""
    fixed = sum(row.is_fixed and not row.counts for row in rows)
    text += f"; {count(fixed, 'case')} marked fixed" if fixed else ""
    return text if verified else f"{text}; nothing was run: merge again without --no-verify where the kernels run"
