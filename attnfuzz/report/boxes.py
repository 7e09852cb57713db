"""Memory drawn as boxes of cells, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.text import Text

from attnfuzz.report.drawing import MARKS, Mark, squeeze

__all__ = ["BoxRow", "TextBox", "cells", "legend"]

_SYMBOLS: dict[Mark, tuple[str, str]] = {
    "fails": ("✗", "bold red"),
    "needle": ("◆", "yellow"),
    "token": ("█", "cyan"),
    "dead": ("·", "dim"),
}
"""Character and style of a mark."""

_GUTTER = 12


def cells(slots: tuple[Mark, ...], *, width: int) -> Text:
    """One character per slot, or per several slots where there are more than ``width``."""
    return Text.assemble(*(_SYMBOLS[mark] for mark in squeeze(slots, cells=width)))


def legend() -> Text:
    """What the characters mean."""
    pairs = ((_SYMBOLS[mark], f" {meaning}   ") for mark, meaning in MARKS.items())
    return Text.assemble(*(part for pair in pairs for part in pair))


@dataclass(frozen=True, slots=True)
class TextBox:
    """A titled box around ``content``; ``style`` colours its border."""

    title: str
    content: Text
    style: str = ""

    @property
    def width(self) -> int:
        return 4 + max(self.content.cell_len, len(self.title))

    def lines(self) -> tuple[Text, Text, Text]:
        inner = self.width - 2
        title = f" {self.title} " if self.title else ""
        middle = Text.assemble(
            ("│ ", self.style), self.content, " " * (inner - 2 - self.content.cell_len), (" │", self.style)
        )
        return (
            Text(f"┌{title.ljust(inner, '─')}┐", self.style),
            middle,
            Text(f"└{'─' * inner}┘", self.style),
        )


@dataclass(frozen=True, slots=True)
class BoxRow:
    """``labels`` (at most three short lines) beside ``boxes``, wrapped at the console's width; ``notes`` below."""

    labels: tuple[str, ...]
    boxes: tuple[TextBox, ...]
    notes: tuple[Text, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        labels = self.labels
        for boxes in _wrapped(self.boxes, options.max_width - _GUTTER):
            yield from _beside(labels, boxes)
            labels = ()
        if not self.boxes:
            yield Text(" ".join(self.labels))
        for note in self.notes:
            yield Text.assemble(" " * _GUTTER, note)


def _beside(labels: tuple[str, ...], boxes: Sequence[TextBox]) -> Iterator[Text]:
    for i, parts in enumerate(zip(*(box.lines() for box in boxes), strict=True)):
        label = labels[i] if i < len(labels) else ""
        yield Text.assemble(label.ljust(_GUTTER), *parts)


def _wrapped(boxes: Iterable[TextBox], width: int) -> Iterator[list[TextBox]]:
    line: list[TextBox] = []
    for box in boxes:
        if line and sum(other.width for other in line) + box.width > width:
            yield line
            line = []
        line.append(box)
    if line:
        yield line
