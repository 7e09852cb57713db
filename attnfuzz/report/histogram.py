"""The distribution of error over bound as a row of bars, on a logarithmic axis that ends beyond the bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from markupsafe import Markup

from attnfuzz.campaign.counts import EXACT, LEAST, MOST, NOT_FINITE, above
from attnfuzz.report.svg import element, path_of_rects, text

__all__ = ["histogram_svg"]

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
    """``counts``: cases by bin of ``attnfuzz.campaign.counts``."""
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
