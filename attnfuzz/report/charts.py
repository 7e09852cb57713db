"""The charts of a campaign's page: error over bound, cases a second over time, coverage of input features."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from markupsafe import Markup

from attnfuzz.campaign.statistics import EXACT, LEAST, MOST, NOT_FINITE, Coverage, Throughput, above
from attnfuzz.campaign.stopping import format_duration
from attnfuzz.problems.feature import Feature
from attnfuzz.report.svg import element, number, path_of_rects, text

_WIDTH, _HEIGHT, _AXIS = 250.0, 76.0, 13.0
_TOP = 18.0
"""Room for the caption, above the bars."""
_BAR = 5.4
_GAP = 10.0
"""On either side of the bins: exact results stand apart, and so do infinities."""
_LEFT = 8.0
_BOUND = 0
"""The last bin within the bound."""


def histogram_svg(counts: Mapping[int, int]) -> Markup:
    """``counts``: cases by bin of ``attnfuzz.campaign.statistics``."""
    most = max(counts.values(), default=0) or 1
    inside = [_bar(number, count, most) for number, count in counts.items() if number <= _BOUND]
    outside = [_bar(number, count, most) for number, count in counts.items() if number > _BOUND]
    bound = _x(_BOUND + 1) - 0.5
    return element(
        "svg",
        element("path", d=f"M{_LEFT - 4:.0f} {_HEIGHT - _AXIS:.1f}H{_WIDTH - 4:.0f}", class_="grid"),
        element("path", d=path_of_rects(inside), class_="bar"),
        element("path", d=path_of_rects(outside), class_="bar over"),
        element("path", d=f"M{bound:.1f} {_TOP - 6:.0f}V{_HEIGHT - _AXIS + 3:.1f}", class_="bound"),
        *_ticks(),
        class_="histogram",
        viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}",
        role="img",
        aria_label="cases by error over bound",
    )


def _bar(number: int, count: int, most: int) -> tuple[float, float, float, float]:
    """Heights grow with the square root: a single case must be seen beside a thousand."""
    height = max(2.0, (_HEIGHT - _AXIS - _TOP) * (count / most) ** 0.5)
    return _x(number), _HEIGHT - _AXIS - height, _BAR - 1, height


def _x(number: int) -> float:
    x = _LEFT + (number - EXACT) * _BAR
    return x + (_GAP if number >= LEAST else 0) + (_GAP if number >= NOT_FINITE else 0)


def _ticks() -> Iterator[Markup]:
    ticks = {"0": EXACT + 0.5, "10⁻³": _bin_of(1e-3), "10⁻²": _bin_of(1e-2), "0.1": _bin_of(0.1), "1": 1.0}
    for label, place in ticks.items():
        x = _LEFT + (place - EXACT) * _BAR + (_GAP if place > EXACT + 1 else 0) - 0.5
        yield text(label, x, _HEIGHT - 2, text_anchor="middle", class_="tick bound" if label == "1" else "tick")


def _bin_of(ratio: float) -> float:
    """Where ``ratio`` lies between bins, as a fraction."""
    number = LEAST
    while above(number) < ratio and number < MOST:
        number += 1
    lower = above(number - 1)
    return number + (ratio - lower) / (above(number) - lower)


_TIMELINE_WIDTH, _TIMELINE_HEIGHT = 1040.0, 200.0
_PLOT_LEFT, _PLOT_RIGHT, _PLOT_TOP, _PLOT_BOTTOM = 52.0, 1028.0, 40.0, 178.0
_MAX_DEVICES = 8
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800)
_MOST_TICKS = 8
_MARK = 9.0

Layer = list[tuple[float, float, float]]
"""Start, end, and rate of each interval, with the rates of the layers below added."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """From seconds and cases a second to places in the drawing."""

    span_s: float
    most: float

    def x(self, seconds: float) -> float:
        return _PLOT_LEFT + (_PLOT_RIGHT - _PLOT_LEFT) * min(seconds / self.span_s, 1.0)

    def y(self, rate: float) -> float:
        return _PLOT_BOTTOM - (_PLOT_BOTTOM - _PLOT_TOP) * rate / self.most


def devices_of(throughput: Throughput) -> list[str]:
    """The devices in the order in which they are stacked, as many as have a colour of their own."""
    return sorted(throughput.counts)[:_MAX_DEVICES]


def timeline_svg(throughput: Throughput, *, elapsed_s: float, found: Sequence[tuple[float, str]]) -> Markup:
    """``found``: when each finding was first seen and its place on the page, in the order of their numbers there."""
    span_s = max(elapsed_s, 1e-3)
    layers = _layers(throughput, span_s)
    scale = _Scale(span_s, _round_up(max((top for layer in layers for _, _, top in layer), default=0.0)))
    return element(
        "svg",
        *_axes(scale),
        *(_area(layer, i, scale) for i, layer in reversed(list(enumerate(layers)))),
        *_marks(found, scale),
        class_="timeline",
        viewBox=f"0 0 {_TIMELINE_WIDTH:.0f} {_TIMELINE_HEIGHT:.0f}",
        role="img",
        aria_label="cases a second over time",
    )


def _layers(throughput: Throughput, span_s: float) -> list[Layer]:
    step = throughput.interval_s
    starts = [i * step for i in range(max(1, math.ceil(span_s / step)))]
    ends = [min(start + step, span_s) for start in starts]
    below = [0.0] * len(starts)
    layers = []
    for device in devices_of(throughput):
        for i, cases in enumerate(throughput.counts[device][: len(starts)]):
            below[i] += cases / max(ends[i] - starts[i], step / 4)  # the last interval may only just have begun
        layers.append(list(zip(starts, ends, below, strict=True)))
    return layers


def _area(layer: Layer, i: int, scale: _Scale) -> Markup:
    tops = (f"L{number(scale.x(start))} {number(scale.y(rate))}H{number(scale.x(end))}" for start, end, rate in layer)
    bottom = number(scale.y(0))
    return element("path", d=f"M{number(_PLOT_LEFT)} {bottom}{''.join(tops)}V{bottom}z", class_=f"area d{i}")


def _axes(scale: _Scale) -> Iterator[Markup]:
    for rate in (0.0, scale.most / 2, scale.most):
        y = scale.y(rate)
        yield element("path", d=f"M{number(_PLOT_LEFT)} {number(y)}H{number(_PLOT_RIGHT)}", class_="grid")
        yield text(f"{rate:,.4g}", _PLOT_LEFT - 6, y + 4, text_anchor="end", class_="tick")
    step = next((step for step in _STEPS_S if scale.span_s / step <= _MOST_TICKS), _STEPS_S[-1])
    for i in range(int(scale.span_s / step) + 1):
        yield text(_moment(i * step), scale.x(i * step), _TIMELINE_HEIGHT - 5, text_anchor="middle", class_="tick")


def _moment(seconds: int) -> str:
    return f"{seconds}s" if 0 < seconds < 60 else format_duration(float(seconds)) if seconds else "0"


def _marks(found: Sequence[tuple[float, str]], scale: _Scale) -> Iterator[Markup]:
    """A numbered disc for each finding, in the order of time."""
    order = sorted(range(len(found)), key=lambda i: found[i][0])
    xs = [scale.x(found[i][0]) for i in order]
    for i, x, place in zip(order, xs, _spread(xs), strict=True):
        line = f"M{number(place)} {number(2 * _MARK + 2)}L{number(x)} {number(_PLOT_TOP)}V{number(_PLOT_BOTTOM)}"
        disc = element("circle", cx=place, cy=_MARK + 2, r=_MARK)
        label = text(str(i + 1), place, _MARK + 6, text_anchor="middle")
        link = element("a", disc, label, href=f"#{found[i][1]}")
        yield element("g", element("path", d=line), link, class_="mark")


def _spread(xs: list[float]) -> list[float]:
    """Places near the ascending ``xs``, apart from each other as far as there is room, and none beyond the right."""
    apart = min(2 * _MARK + 2, (_TIMELINE_WIDTH - 4 * _MARK) / max(1, len(xs)))
    places: list[float] = []
    for x in xs:
        places.append(max(x, places[-1] + apart) if places else x)
    limit = _TIMELINE_WIDTH - _MARK - 1
    for i in reversed(range(len(places))):
        places[i] = min(places[i], limit)
        limit = places[i] - apart
    return places


def _round_up(rate: float) -> float:
    """To 1, 2, 4 or 6 times a power of ten, whose half is a round number too."""
    if rate <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rate))
    return next(factor * power for factor in (1, 2, 4, 6, 10, 20) if factor * power >= rate)


_SHADES = (1, 3, 10, 30, 100)
"""A shade begins at each of these numbers of cases."""
_CELL, _AXIS_GAP = 10.0, 5.0
_LABELS = 190.0


def _shade(cases: int) -> str:
    """The class of a cell: "hole" for a pair that was never met, then "s1" to "s5" for more cases."""
    return f"s{sum(cases >= least for least in _SHADES)}" if cases else "hole"


@dataclass(frozen=True, slots=True)
class CoverageMap:
    """The drawing, and what its cells are: for the script that tells them when they are pointed at.

    ``cells[i]`` are the cases of level ``i`` with each level before it; -1 on the same axis.
    """

    svg: Markup
    data: dict[str, Any]


def coverage_map(coverage: Coverage) -> CoverageMap:
    """Every level of every axis against every other one, as a triangle with the levels' names along its edge."""
    levels = coverage.levels
    places = list(_places(levels))
    cells = [[_cases(coverage, levels[j], levels[i]) for j in range(i)] for i in range(len(levels))]
    size = places[-1] + _CELL if places else 0.0
    svg = element(
        "svg",
        *_shaded(cells, places),
        *_names(levels, places),
        class_="map",
        viewBox=f"0 0 {number(size + _LABELS)} {number(size + _CELL)}",
        width=size + _LABELS,
        role="img",
        aria_label="cases by pair of features",
    )
    names = [f"{level.field}: {level.level}" for level in levels]
    return CoverageMap(svg, {"names": names, "places": places, "cell": _CELL, "cells": cells})


def _cases(coverage: Coverage, one: Feature, other: Feature) -> int:
    if one.field == other.field:
        return -1
    return coverage.cases(one, other)


def _places(levels: Sequence[Feature]) -> Iterator[float]:
    """Where the row and the column of each level begin."""
    place = 0.0
    for _, group in groupby(levels, key=lambda level: level.field):
        for _ in group:
            yield place
            place += _CELL
        place += _AXIS_GAP


def _shaded(cells: list[list[int]], places: list[float]) -> Iterator[Markup]:
    """One path for each shade."""
    rects: dict[str, list[tuple[float, float, float, float]]] = {}
    for i, row in enumerate(cells):
        for j, cases in enumerate(row):
            if cases >= 0:
                rects.setdefault(_shade(cases), []).append((places[j], places[i], _CELL - 1, _CELL - 1))
    return (element("path", d=path_of_rects(found), class_=name) for name, found in sorted(rects.items()))


def _names(levels: Sequence[Feature], places: list[float]) -> Iterator[Markup]:
    """Beside the diagonal, where a level's row ends and its column begins; an axis is named beside its first level."""
    shown = ""
    for level, place in zip(levels, places, strict=True):
        label = element("tspan", Markup.escape(level.level))
        if level.field != shown:
            label += element("tspan", Markup.escape(f"  {level.field}"), class_="axis")
        shown = level.field
        yield element("rect", x=place, y=place, width=_CELL - 1, height=_CELL - 1, class_="self")
        yield element("text", label, x=place + _CELL + 3, y=place + _CELL - 1.5, class_="name")
