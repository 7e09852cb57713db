"""Cases a second over the time of a campaign, by device, with the findings where they were first seen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from attnfuzz.campaign.counts import Throughput
from attnfuzz.campaign.stopping import format_duration
from attnfuzz.report.svg import element, number, text

__all__ = ["devices_of", "timeline_svg"]

_WIDTH, _HEIGHT = 1040.0, 200.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 12.0, 40.0, 22.0
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
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(seconds / self.span_s, 1.0)

    def y(self, rate: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * rate / self.most


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
        viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}",
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
    return element("path", d=f"M{number(_LEFT)} {bottom}{''.join(tops)}V{bottom}z", class_=f"area d{i}")


def _axes(scale: _Scale) -> Iterator[Markup]:
    for rate in (0.0, scale.most / 2, scale.most):
        y = scale.y(rate)
        yield element("path", d=f"M{number(_LEFT)} {number(y)}H{number(_WIDTH - _RIGHT)}", class_="grid")
        yield text(f"{rate:,.4g}", _LEFT - 6, y + 4, text_anchor="end", class_="tick")
    step = next((step for step in _STEPS_S if scale.span_s / step <= _MOST_TICKS), _STEPS_S[-1])
    for i in range(int(scale.span_s / step) + 1):
        yield text(_moment(i * step), scale.x(i * step), _HEIGHT - 5, text_anchor="middle", class_="tick")


def _moment(seconds: int) -> str:
    return f"{seconds}s" if 0 < seconds < 60 else format_duration(float(seconds)) if seconds else "0"


def _marks(found: Sequence[tuple[float, str]], scale: _Scale) -> Iterator[Markup]:
    """A numbered disc for each finding, in the order of time."""
    order = sorted(range(len(found)), key=lambda i: found[i][0])
    xs = [scale.x(found[i][0]) for i in order]
    for i, x, place in zip(order, xs, _spread(xs), strict=True):
        line = f"M{number(place)} {number(2 * _MARK + 2)}L{number(x)} {number(_TOP)}V{number(_HEIGHT - _BOTTOM)}"
        disc = element("circle", cx=place, cy=_MARK + 2, r=_MARK)
        label = text(str(i + 1), place, _MARK + 6, text_anchor="middle")
        link = element("a", disc, label, href=f"#{found[i][1]}")
        yield element("g", element("path", d=line), link, class_="mark")


def _spread(xs: list[float]) -> list[float]:
    """Places near the ascending ``xs``, apart from each other as far as there is room, and none beyond the right."""
    apart = min(2 * _MARK + 2, (_WIDTH - 4 * _MARK) / max(1, len(xs)))
    places: list[float] = []
    for x in xs:
        places.append(max(x, places[-1] + apart) if places else x)
    limit = _WIDTH - _MARK - 1
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
