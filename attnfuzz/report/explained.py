"""What ``attnfuzz explain`` found out, for the terminal and for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console, ConsoleOptions
from rich.text import Text

from attnfuzz.corpus import Regression
from attnfuzz.declaration import Declaration
from attnfuzz.explaining.explanation import Explanation, WeightBox, WeightedRow
from attnfuzz.oracles.verdict import Failure, where_to_look
from attnfuzz.report.files import write_file
from attnfuzz.report.headline import count, one_line

__all__ = ["FORMAT", "Explained", "print_explained", "write_explained"]

FORMAT = "attnfuzz.explanation/1"

_BARS = "▁▂▃▄▅▆▇█"
_NONE = "·"
_UNKNOWN = "?"
_WRONG = "✗"
_GUTTER = 10
_BETWEEN = 3
_MOST_NUMBERS = 4


@dataclass(frozen=True, slots=True)
class Explained:
    """A saved case with what was found out about it; ``failure`` is None if it passes now."""

    path: Path
    regression: Regression
    kernel: Declaration
    failure: Failure | None
    explanation: Explanation


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    path: str
    kernel: str
    problem: str
    failure: Failure | None
    explanation: Explanation


def write_explained(path: Path, explained: Explained) -> None:
    """Write it as indented JSON. Raises OSError."""
    document = _Document(
        format=FORMAT,
        path=str(explained.path),
        kernel=explained.kernel.target,
        problem=str(explained.kernel.problem),
        failure=explained.failure,
        explanation=explained.explanation,
    )
    write_file(path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def print_explained(console: Console, explained: Explained) -> None:
    """What failed, why, and the weights."""
    failure = explained.failure
    console.print(Text(f"{explained.path}  {explained.kernel.target}", "bold"), soft_wrap=True)
    console.print(Text(one_line(explained.regression.case), "dim"), soft_wrap=True)
    if failure is None:
        console.print(Text("the case passes", "green"), soft_wrap=True)
    else:
        console.print(Text(f"{failure.oracle}/{failure.kind}: {failure.message}", "red"), soft_wrap=True)
    console.print()
    for line in (*where_to_look(explained.explanation.sources), *explained.explanation.lines):
        console.print(Text(line, "bold"), soft_wrap=True)
    for line in explained.explanation.changes:
        console.print(Text(line), soft_wrap=True)
    for row in explained.explanation.rows:
        console.print()
        console.print(_Picture(row))


@dataclass(frozen=True, slots=True)
class _Picture:
    """Expected and actual weights of one row as bars, and those that are wrong in numbers."""

    row: WeightedRow

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        verdict = "" if self.row.wrong else ": every weight is right"
        yield Text(f"{self.row.title}{verdict}", "bold")
        weights = [*(value for box in self.row.boxes for value in box.expected)]
        weights += [value for box in self.row.boxes for value in box.got if value is not None]
        top = max(map(abs, weights), default=0.0)
        for boxes in _wrapped(self.row.boxes, options.max_width - _GUTTER):
            yield _line("", [Text(_title(box), "dim") for box in boxes], boxes)
            yield _line("expected", [_expected(box, top) for box in boxes], boxes)
            yield _line("got", [_got(box, top) for box in boxes], boxes)
            if any(any(box.wrong) for box in boxes):
                yield _line("", [_marks(box) for box in boxes], boxes)
        yield from self._numbers()

    def _numbers(self) -> Iterator[Text]:
        wrong = [
            (_place(box, i), box.got[i], box.expected[i])
            for box in self.row.boxes
            for i in range(len(box.wrong))
            if box.wrong[i]
        ]
        wrong.sort(key=lambda weight: -math.inf if weight[1] is None else -abs(weight[1] - weight[2]))
        for where, got, expected in wrong[:_MOST_NUMBERS]:
            shown = "NaN or infinite" if got is None else f"{got:.4g}"
            yield Text(f"{' ' * _GUTTER}{_WRONG} {where}: {shown}, expected {expected:.4g}", "red")
        if len(wrong) > _MOST_NUMBERS:
            yield Text(f"{' ' * _GUTTER}... and {count(len(wrong) - _MOST_NUMBERS, 'more weight')}", "dim")


def _place(box: WeightBox, i: int) -> str:
    return f"{box.title}, {box.unit} {box.numbers[i]}" if box.unit else box.title


def _title(box: WeightBox) -> str:
    return f"{count(box.skipped, 'page')}, right" if box.skipped else box.title


def _width(box: WeightBox) -> int:
    return max(len(_title(box)), len(box.got)) + _BETWEEN


def _wrapped(boxes: tuple[WeightBox, ...], width: int) -> Iterator[list[WeightBox]]:
    line: list[WeightBox] = []
    for box in boxes:
        if line and sum(map(_width, line)) + _width(box) > width:
            yield line
            line = []
        line.append(box)
    if line:
        yield line


def _line(label: str, parts: list[Text], boxes: list[WeightBox]) -> Text:
    text = Text(label.ljust(_GUTTER))
    for part, box in zip(parts, boxes, strict=True):
        text.append_text(part)
        text.append(" " * (_width(box) - part.cell_len))
    text.rstrip()
    return text


def _expected(box: WeightBox, top: float) -> Text:
    return Text("".join(_bar(value, top) for value in box.expected))


def _got(box: WeightBox, top: float) -> Text:
    parts = zip(box.got, box.wrong, strict=True)
    return Text.assemble(*((_bar(value, top), "bold red" if wrong else "cyan") for value, wrong in parts))


def _marks(box: WeightBox) -> Text:
    return Text("".join(_WRONG if wrong else " " for wrong in box.wrong), "bold red")


def _bar(value: float | None, top: float) -> str:
    if value is None:
        return _UNKNOWN
    if value == 0 or not top:
        return _NONE
    return _BARS[min(len(_BARS) - 1, int(abs(value) / top * len(_BARS)))]
