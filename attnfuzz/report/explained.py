"""Explanations of ``attnfuzz explain``: for a terminal, as JSON, and as a drawing of the weights, SVG or PNG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from markupsafe import Markup
from rich.console import Console, ConsoleOptions
from rich.text import Text

from attnfuzz.corpus import Regression
from attnfuzz.declaration import Declaration
from attnfuzz.explaining.explanation import Explanation, WeightBox, WeightedRow
from attnfuzz.report.files import write_json
from attnfuzz.report.findings import count, one_line, wrapped
from attnfuzz.report.svg import element, text
from attnfuzz.verdict import Failure, where_to_look

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
    write_json(path, document)


def print_explained(console: Console, explained: Explained) -> None:
    """Print the failure, its causes, and the weights."""
    failure = explained.failure
    console.print(Text(f"{explained.path}  {explained.kernel.target}", "bold"), soft_wrap=True)
    console.print(Text(one_line(explained.regression.case), "dim"), soft_wrap=True)
    if failure is None:
        console.print(Text("the case passes", "green"), soft_wrap=True)
    else:
        console.print(Text(f"{failure.name}: {failure.message}", "red"), soft_wrap=True)
    console.print()
    message = "" if failure is None else failure.message
    unsaid = [line for line in explained.explanation.lines if f"; {line}" not in message]
    for line in (*where_to_look(explained.explanation.sources), *unsaid):
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
        for boxes in wrapped(self.row.boxes, options.max_width - _GUTTER, _width):
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


_WIDTH = 860.0
_MARGIN = 20.0
_LINE = 19.0
_CHARACTERS = {"strong": 98, "bad": 112, "line": 112}
_BAR = 13.0
_BARS_HEIGHT = 48.0
_PADDING = 8.0
_TITLE = 18.0
_FOOT = 16.0
_GAP = 10.0
_CHARACTER = 6.3
_SLOTS_PER_BOX = 48

_LIGHT = {
    ".back": "fill: #ffffff",
    "text": "fill: #17191c; font: 13px 'DejaVu Sans', system-ui, sans-serif",
    ".strong": "font-weight: 700",
    ".dim": "fill: #646b75; font-size: 11px",
    ".bad": "fill: #c92a2a",
    ".page": "fill: #f6f7f9; stroke: #d5dae1",
    ".page.wrong": "stroke: #c92a2a",
    ".expected": "fill: none; stroke: #8b95a3",
    ".got": "fill: #5b86e5",
    ".got.wrong": "fill: #c92a2a",
    ".base": "stroke: #b9c0ca",
}
_DARK = {
    ".back": "fill: #0e1013",
    "text": "fill: #e4e7eb",
    ".dim": "fill: #929aa5",
    ".bad": "fill: #ff7b72",
    ".page": "fill: #16191e; stroke: #2a2f37",
    ".page.wrong": "stroke: #ff7b72",
    ".expected": "stroke: #7c8694",
    ".got": "fill: #4a74cf",
    ".got.wrong": "fill: #ff7b72",
    ".base": "stroke: #434b56",
}


def explained_svg(explained: Explained, *, dark_screens: bool = True) -> str:
    """The file. Without `dark_screens` it is light everywhere."""
    parts: list[Markup] = []
    y = _MARGIN
    for line, style in _sentences(explained):
        for piece in _broken(line, _CHARACTERS[style]):
            y += _LINE
            parts.append(text(piece, _MARGIN, y, class_=style))
    drawn, y = _rows(explained.explanation.rows, y)
    height = y + _MARGIN
    back = element("rect", class_="back", width=_WIDTH, height=height)
    style = _style(dark_screens=dark_screens)
    return f"{_drawing(height, style, back, *parts, *drawn, xmlns='http://www.w3.org/2000/svg')}\n"


def weights_svg(rows: Sequence[WeightedRow]) -> Markup:
    """The weights alone, for a page that has rules for what is of the class ``weights``."""
    drawn, y = _rows(rows, -2 * _GAP)
    return _drawing(y + _MARGIN, *drawn, class_="weights")


def _drawing(height: float, *parts: Markup, **attributes: str) -> Markup:
    return element(
        "svg",
        *parts,
        **attributes,
        viewBox=f"0 0 {_WIDTH:.0f} {height:.0f}",
        width=_WIDTH,
        height=height,
        role="img",
        aria_label="Expected and actual weights",
    )


def _rows(rows: Sequence[WeightedRow], y: float) -> tuple[list[Markup], float]:
    """All rows with their legend below ``y``, and where that ends."""
    parts: list[Markup] = []
    for row in rows:
        drawn, y = _row(row, y + 2 * _GAP)
        parts += drawn
    if rows:
        y += 2 * _GAP
        parts += _legend(y)
    return parts, y


def _style(*, dark_screens: bool) -> Markup:
    rules = _rules(_LIGHT)
    if dark_screens:
        rules += f"@media (prefers-color-scheme: dark) {{ {_rules(_DARK)}}} "
    return element("style", Markup(rules))


def _rules(styles: dict[str, str]) -> str:
    return "".join(f"{selector} {{ {style}; }} " for selector, style in styles.items())


def _sentences(explained: Explained) -> Iterator[tuple[str, str]]:
    yield f"{explained.kernel.name}: {one_line(explained.regression.case)}", "strong"
    if explained.failure is not None:
        yield f"{explained.failure.name}: {explained.failure.message}", "bad"
    for line in explained.explanation.all_lines:
        yield line, "line"


def _broken(line: str, most: int) -> Iterator[str]:
    """Pieces of a line that fit."""
    piece = ""
    for word in line.split():
        if piece and len(piece) + 1 + len(word) > most:
            yield piece
            piece = f"  {word}"
        else:
            piece = f"{piece} {word}" if piece else word
    yield piece


def _row(row: WeightedRow, top: float) -> tuple[list[Markup], float]:
    """Its elements, and where they end."""
    y = top + _LINE
    title = row.title if row.wrong else f"{row.title}: every weight is right"
    parts = [text(title, _MARGIN, y, class_="strong bad" if row.wrong else "strong")]
    y += _GAP
    weights = [value for box in row.boxes for value in (*box.got, *box.expected) if value is not None]
    largest = max(map(abs, weights), default=0.0) or 1.0
    x, height = _MARGIN, _TITLE + _BARS_HEIGHT + _FOOT
    for box in row.boxes:
        width = _box_width(box)
        if x > _MARGIN and x + width > _WIDTH - _MARGIN:
            x, y = _MARGIN, y + height + _GAP
        parts += _box(box, x, y, width, height, largest)
        x += width + _GAP
    return parts, y + height


def _box_width(box: WeightBox) -> float:
    return max(min(len(box.got), _SLOTS_PER_BOX) * _BAR, _CHARACTER * len(_title(box))) + 2 * _PADDING


def _box(box: WeightBox, x: float, y: float, width: float, height: float, largest: float) -> Iterator[Markup]:
    wrong = " wrong" if any(box.wrong) else ""
    yield element("rect", x=x, y=y, width=width, height=height, rx=4.0, class_=f"page{wrong}")
    yield text(_title(box), x + _PADDING, y + _TITLE - 4, class_="dim bad" if wrong else "dim")
    floor = y + _TITLE + _BARS_HEIGHT
    if box.got:
        yield element("path", d=f"M{x + _PADDING} {floor}h{width - 2 * _PADDING}", class_="base")
    for i in range(min(len(box.got), _SLOTS_PER_BOX)):
        yield from _slot(box, i, x + _PADDING + i * _BAR, floor, largest)


def _slot(box: WeightBox, i: int, x: float, floor: float, largest: float) -> Iterator[Markup]:
    got, expected, wrong = box.got[i], box.expected[i], box.wrong[i]
    high = _BARS_HEIGHT * abs(got or 0.0) / largest
    if high:
        name = "got wrong" if wrong else "got"
        yield element("rect", x=x + 3, y=floor - high, width=_BAR - 6, height=high, class_=name)
    if expected:
        high = _BARS_HEIGHT * expected / largest
        yield element("rect", x=x + 1, y=floor - high, width=_BAR - 2, height=high, class_="expected")
    if wrong:
        mark = "?" if got is None else "✗"
        yield text(mark, x + _BAR / 2, floor + _FOOT - 4, class_="bad", text_anchor="middle")


def _legend(y: float) -> Iterator[Markup]:
    x = _MARGIN
    for name, words in (("expected", "expected weight"), ("got", "weight it has"), ("got wrong", "wrong weight")):
        yield element("rect", x=x, y=y - 9, width=9.0, height=9.0, class_=name)
        yield text(words, x + 15, y, class_="dim")
        x += 15 + _CHARACTER * len(words) + 2 * _GAP


_ZOOM = 2.0
"""For screens with small pixels."""


class RasteriserMissing(ImportError):  # noqa: N818 - says what is missing
    """resvg is not installed; the message is one sentence with the remedy."""


def explained_png(explained: Explained) -> bytes:
    """The file, light. Raises RasteriserMissing."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise RasteriserMissing("a PNG needs resvg: pip install 'attnfuzz[png]', or name a file.svg") from error
    return svg_to_bytes(svg_string=explained_svg(explained, dark_screens=False), zoom=_ZOOM)
