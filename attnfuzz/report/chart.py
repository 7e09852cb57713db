"""A chart of lines over a logarithmic axis, as SVG whose colours come from the page: light or dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from attnfuzz.report.svg import element, number, text

__all__ = ["MOST_LINES", "Chart", "Line", "chart_svg"]

_WIDTH, _HEIGHT = 520.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 14.0, 42.0, 40.0
MOST_LINES = 8
"""As many as have a colour of their own."""


@dataclass(frozen=True, slots=True)
class Line:
    """``points``: x and y, ascending in x, both above 0. ``colour``: from 0 to 7."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """``y_from_zero``: a linear y axis from 0, else a logarithmic one. ``ceiling``: a line across, and its name."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    y_from_zero: bool = False
    ceiling: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    begins: float
    ends: float
    is_log: bool

    def at(self, value: float) -> float:
        low, high, value = (
            (math.log(self.low), math.log(self.high), math.log(value)) if self.is_log else (self.low, self.high, value)
        )
        return self.begins + (self.ends - self.begins) * (value - low) / (high - low or 1.0)


def chart_svg(chart: Chart) -> Markup:
    """The drawing. Raises ValueError if there is no point."""
    points = [point for line in chart.lines for point in line.points]
    if not points:
        raise ValueError(f"the chart {chart.title!r} has no points; leave it out")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if chart.ceiling is not None:
        ys.append(chart.ceiling[0])
    x_axis = _Axis(min(xs) / 1.15, max(xs) * 1.15, _LEFT, _WIDTH - _RIGHT, is_log=True)
    low = 0.0 if chart.y_from_zero else min(ys) / 1.2
    y_axis = _Axis(low, max(ys) * (1.08 if chart.y_from_zero else 1.2), _HEIGHT - _BOTTOM, _TOP, not chart.y_from_zero)
    return element(
        "svg",
        text(chart.title, _LEFT, 15, class_="chart-title"),
        *_grid(chart, x_axis, y_axis, sorted(set(xs))),
        *_ceiling(chart, y_axis),
        *(_drawn(line, x_axis, y_axis) for line in chart.lines),
        class_="chart",
        viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}",
        role="img",
        aria_label=f"{chart.title}: {chart.y_label} over {chart.x_label}",
    )


def _grid(chart: Chart, x_axis: _Axis, y_axis: _Axis, xs: Sequence[float]) -> Iterator[Markup]:
    for value in _ticks(y_axis):
        y = y_axis.at(value)
        yield element("path", d=f"M{number(_LEFT)} {number(y)}H{number(_WIDTH - _RIGHT)}", class_="grid")
        yield text(_short(value), _LEFT - 6, y + 4, text_anchor="end", class_="tick")
    shown = -math.inf
    for value in xs:
        x = x_axis.at(value)
        if x - shown >= 40:
            shown = x
            yield text(_short(value), x, _HEIGHT - _BOTTOM + 15, text_anchor="middle", class_="tick")
    yield text(chart.x_label, (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, text_anchor="middle", class_="tick")
    yield text(chart.y_label, _LEFT, 31, class_="tick")


def _ceiling(chart: Chart, y_axis: _Axis) -> Iterator[Markup]:
    if chart.ceiling is not None:
        value, name = chart.ceiling
        y = y_axis.at(value)
        yield element("path", d=f"M{number(_LEFT)} {number(y)}H{number(_WIDTH - _RIGHT)}", class_="ceiling")
        yield text(name, _LEFT + 4, y - 4, class_="tick")


def _drawn(line: Line, x_axis: _Axis, y_axis: _Axis) -> Markup:
    places = [(x_axis.at(x), y_axis.at(y)) for x, y in line.points]
    path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in places)
    dots = (
        element(
            "circle", element("title", Markup("{}: {} at {}").format(line.name, _short(y), _short(x))),
            cx=float(px), cy=float(py), r=2.6,
        )
        for (x, y), (px, py) in zip(line.points, places, strict=True)
    )  # fmt: skip
    classes = f"line d{line.colour}{' dashed' if line.dashed else ''}"
    return element("g", element("path", d=path), *dots, class_=classes)


def _ticks(axis: _Axis) -> list[float]:
    if not axis.is_log:
        step = _round_step((axis.high - axis.low) / 5)
        return [i * step for i in range(int(axis.high / step) + 1)]
    powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    fine = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    inside = [value for value in fine if axis.low <= value <= axis.high]
    if len(inside) < 3:
        fine = [factor * 10.0**power for power in powers for factor in range(1, 10)]
        return [value for value in fine if axis.low <= value <= axis.high]
    return inside if len(inside) <= 9 else [value for value in inside if math.log10(value) % 1 < 1e-9]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step)


def _short(value: float) -> str:
    """``4096``, ``32k``, ``1.07G``: powers of two of tokens in full up to 9999."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.4g}"
