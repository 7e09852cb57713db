"""All charts of kernel times in one picture, by resvg: light, with colours of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from markupsafe import Markup

from attnfuzz.bench.kernels.results import Report
from attnfuzz.report.bench_charts import charts_of
from attnfuzz.report.chart import Line, chart_svg
from attnfuzz.report.explained import RasteriserMissing
from attnfuzz.report.svg import element, text

__all__ = ["bench_png", "bench_svg"]

_ZOOM = 2.0
_WIDTH, _HEIGHT, _KEYS = 520, 300, 22
_COLOURS = ("#5b86e5", "#39a88e", "#d98b3a", "#a77bd8", "#d0638c", "#7b9a3d", "#4aa5c9", "#8d8d95")
_STYLE = (
    "text{font-family:DejaVu Sans,sans-serif;fill:#17191c}.tick{font-size:11px;fill:#646b75}"
    ".chart-title{font-size:13px;font-weight:600}.grid{stroke:#e1e4e9;fill:none}"
    ".ceiling{stroke:#c92a2a;stroke-dasharray:4 4;fill:none}.line path{fill:none;stroke-width:1.8}"
    + "".join(f".d{i} path{{stroke:{one}}}.d{i} circle,rect.d{i}{{fill:{one}}}" for i, one in enumerate(_COLOURS))
)


def bench_svg(report: Report) -> str | None:
    """Two charts a row, each with its key below; None if there is nothing to draw."""
    charts = [chart for suite in report.suites for chart in charts_of(report, suite)]
    if not charts:
        return None
    parts = []
    for i, chart in enumerate(charts):
        x, y = i % 2 * _WIDTH, i // 2 * (_HEIGHT + _KEYS)
        placed = f'<svg x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" '
        inner = re.sub('^<svg class="chart" ', placed, chart_svg(chart))
        parts += [Markup(inner), element("g", *_key(chart.lines), transform=f"translate({x + 56} {y + _HEIGHT + 8})")]
    height = -(-len(charts) // 2) * (_HEIGHT + _KEYS)
    page = element("rect", width="100%", height="100%", fill="#fff")
    return str(
        element(
            "svg",
            element("style", Markup(_STYLE)),
            page,
            *parts,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {2 * _WIDTH} {height}",
            width=float(2 * _WIDTH),
            height=float(height),
        )
    )


def bench_png(report: Report) -> bytes | None:
    """The file; None if there is nothing to draw. Raises RasteriserMissing."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise RasteriserMissing("a PNG needs resvg: pip install 'attnfuzz[png]', or use --html") from error
    drawn = bench_svg(report)
    return None if drawn is None else svg_to_bytes(svg_string=drawn, zoom=_ZOOM)


def _key(lines: Sequence[Line]) -> list[Markup]:
    parts, x = [], 0.0
    for line in lines:
        parts.append(element("rect", x=x, y=-8.0, width=10.0, height=10.0, class_=f"d{line.colour}"))
        parts.append(text(line.name, x + 14, 1.0, class_="tick"))
        x += 26.0 + 6.4 * len(line.name)
    return parts
