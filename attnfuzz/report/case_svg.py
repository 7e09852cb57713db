"""The picture of a case for an HTML page: pages as boxes, their slots as squares."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from attnfuzz.report.drawing import Box, Drawing, Mark, Sequence, squeeze
from attnfuzz.report.headline import count
from attnfuzz.report.svg import element, text

__all__ = ["case_svg"]

_WIDTH = 760.0
_LABELS = 92.0
_SLOT = 11.0
_SLOTS_PER_LINE = 16
_MAX_SLOTS = 64
_PADDING = 5.0
_TITLE = 17.0
_GAP = 8.0
_LINE = 15.0
_CHARACTER = 6.2


def case_svg(drawing: Drawing) -> Markup:
    """The sequences of ``drawing`` below each other; pages wrap at the right."""
    parts: list[Markup] = []
    y = 0.0
    for sequence in drawing.sequences:
        drawn, height = _sequence(sequence, y)
        parts += drawn
        y += height + _GAP
    return element(
        "svg",
        *parts,
        class_="case",
        viewBox=f"0 0 {_WIDTH:.0f} {max(y, _LINE):.0f}",
        width=_WIDTH,
        role="img",
        aria_label=f"{count(len(drawing.sequences), 'sequence')} with their pages",
    )


def _sequence(sequence: Sequence, top: float) -> tuple[list[Markup], float]:
    """Its elements, and how much height they take."""
    label = count(sequence.length, "token") if sequence.length else "empty"
    parts = [
        text(f"seq {sequence.number}", 0, top + _LINE - 3, class_="label fails" if sequence.fails else "label"),
        text(label, 0, top + 2 * _LINE - 3, class_="note"),
    ]
    x, y, line_height = _LABELS, top, 0.0
    for box in sequence.boxes:
        width, height = _size(box)
        if x > _LABELS and x + width > _WIDTH:
            x, y, line_height = _LABELS, y + line_height + _GAP, 0.0
        parts += _box(box, x, y, width, height)
        x, line_height = x + width + _GAP, max(line_height, height)
    y += line_height or -3
    for note in sequence.notes:
        y += _LINE
        parts.append(text(note, _LABELS, y, class_="note"))
    return parts, max(y + _PADDING, top + 2 * _LINE + _PADDING) - top


def _size(box: Box) -> tuple[float, float]:
    shown = min(len(box.slots), _MAX_SLOTS)
    columns, lines = min(shown, _SLOTS_PER_LINE), -(-shown // _SLOTS_PER_LINE)
    title = _CHARACTER * max(len(box.title), len(_skipped(box)))
    return max(columns * _SLOT, title) + 2 * _PADDING, _TITLE + max(1, lines) * _SLOT + _PADDING


def _box(box: Box, x: float, y: float, width: float, height: float) -> Iterator[Markup]:
    fails = "fails" in box.slots
    frame = "page fails" if fails else "page skipped" if box.skipped else "page"
    yield element("rect", x=x, y=y, width=width, height=height, rx=3.0, class_=frame)
    yield text(box.title, x + _PADDING, y + _TITLE - 5, class_="title fails" if fails else "title")
    if box.skipped:
        yield text(_skipped(box), x + _PADDING, y + _TITLE + _SLOT - 2, class_="note")
    for i, mark in enumerate(squeeze(box.slots, cells=_MAX_SLOTS)):
        line, column = divmod(i, _SLOTS_PER_LINE)
        yield _slot(mark, x + _PADDING + column * _SLOT, y + _TITLE + line * _SLOT)


def _slot(mark: Mark, x: float, y: float) -> Markup:
    half = (_SLOT - 1) / 2
    if mark == "needle":
        diamond = f"M{x + half} {y}l{half} {half}l-{half} {half}l-{half} -{half}z"
        return element("path", d=diamond, class_="needle")
    if mark == "dead":
        return element("circle", cx=x + half, cy=y + half, r=1.5, class_="dead")
    square = element("rect", x=x, y=y, width=_SLOT - 1, height=_SLOT - 1, rx=1.5, class_=mark)
    if mark == "token":
        return square
    cross = f"M{x + 2.5} {y + 2.5}l5 5m0 -5l-5 5"
    return element("g", square, element("path", d=cross, class_="cross"))


def _skipped(box: Box) -> str:
    return count(box.skipped, "page") if box.skipped else ""
