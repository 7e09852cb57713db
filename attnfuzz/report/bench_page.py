"""Times of kernels as one HTML page that needs nothing else, light or dark as the reader's screen is, with plots.

Matplotlib plots latency over length, bandwidth over bytes, and what splitting is worth; a PNG has the plots alone.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from markupsafe import Markup

from attnfuzz.bench.kernels.measurements import Report, Result, State
from attnfuzz.report.bench import states_of
from attnfuzz.untrusted_text import only_printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from attnfuzz.report.bench import REFERENCES, options_text, ratio_to, summary_of, varied_options
from attnfuzz.report.files import rendered

__all__ = [
    "NO_MATPLOTLIB",
    "Chart",
    "Curve",
    "bench_page",
    "can_plot",
    "charts_of",
    "drawn_svg",
    "plots_png",
    "plots_svg",
]

NO_MATPLOTLIB = "plots need matplotlib: pip install 'attnfuzz[plot]'"

_COLOURS = (
    "#5b86e5", "#39a88e", "#d98b3a", "#a77bd8", "#d0638c", "#7b9a3d", "#4aa5c9", "#8d8d95",
    "#b5543c", "#c2a83e", "#3f5fa8", "#2f7a5f",
)  # fmt: skip
_INK = "#646b75"
_CEILING = "#c92a2a"
_INCHES = (6.2, 3.6)
"""Of one plot; two beside each other."""


@dataclass(frozen=True, slots=True)
class Curve:
    """``points``: x and y, ascending in x, both above 0. ``colour``: from 0 to 11. ``scattered``: with no line."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False
    scattered: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """With ``ceiling``, which ``limit`` names, y is linear from 0 on; else it is logarithmic, as x always is."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Curve]
    ceiling: float | None = None
    limit: str = "copy"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plots_svg(report: Report, suite: str) -> Markup | None:
    """The plots of one suite, for a page that is light or dark: what is no line has the colour of the text around it.

    None if there is nothing to draw. Raises ImportError without matplotlib.
    """
    charts = charts_of(report, suite)
    if not charts:
        return None
    return Markup(drawn_svg(charts, salt=suite).replace(_INK, "currentColor"))


def drawn_svg(charts: Sequence[Chart], *, salt: str, columns: int = 2) -> str:
    """The charts, ``columns`` of them beside each other, on nothing, with ids that ``salt`` makes its own.

    Raises ImportError without matplotlib.
    """
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with _settings(salt=salt):
        file = io.StringIO()
        _figure(charts, columns).savefig(file, format="svg", transparent=True, metadata=no_metadata)
    drawn = file.getvalue()
    return drawn[drawn.index("<svg") :]


def plots_png(report: Report) -> bytes | None:
    """All plots as a PNG; None if there is nothing to draw. Raises ImportError without matplotlib."""
    charts = [chart for suite in report.suites for chart in charts_of(report, suite)]
    if not charts:
        return None
    with _settings(salt="png"):
        file = io.BytesIO()
        _figure(charts).savefig(file, format="png", dpi=160)
    return file.getvalue()


def charts_of(report: Report, suite: str, names: Sequence[str] = ()) -> list[Chart]:
    """Charts of the suite's timed results, in the first state of launch and cache in which anything was timed.

    What has only one length is no line, and left out. Over lengths, or sequences where batches are ragged, only the
    suite's first page size is drawn; all are in the chart of the bandwidth. ``names``: contenders in the order of their
    colours, where those of several suites are to have the same.
    """
    results = [one for one in report.chosen(suite) if one.times]
    states = states_of(results)
    if not states:
        return []
    state, names = states[0], names or _names(results)
    said = f"{'CUDA graph' if state[0] == 'graph' else 'eager'}, L2 {state[1]}"
    is_ragged = 2 * sum(not one.shape.is_even for one in results) > len(results)
    place, label = (_num_seqs, "sequences in the batch") if is_ragged else (_longest, _x_label(results))
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.shape.block_size == results[0].shape.block_size:
            groups[_group(result, is_ragged=is_ragged)].append(result)
    charts = [
        Chart(group, label, f"microseconds, {said}", _lines(some, names, place, partial(_median, state=state)))
        for group, some in groups.items()
    ]
    speeds = _lines(results, names, lambda one: float(one.nbytes), lambda one: one.gigabytes_per_s(*state))
    bandwidth = Chart("bandwidth", "bytes to move", f"GB/s, {said}", speeds, report.peak_gb_s)
    return [chart for chart in (*charts, bandwidth) if any(len(line.points) > 1 for line in chart.lines)]


def _names(results: Sequence[Result]) -> list[str]:
    """Contenders or steps in the order of their colours: the same one has the same in all charts of a suite."""
    return list(dict.fromkeys(one.name for one in results))[: len(_COLOURS)]


def _lines(
    results: Sequence[Result],
    names: Sequence[str],
    x: Callable[[Result], float],
    y: Callable[[Result], float | None],
) -> list[Curve]:
    """One for each contender, and a dashed one for its graph with room for more; medians where an x comes again."""
    found: dict[tuple[int, bool], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in results:
        if one.name in names and (value := y(one)) is not None:
            found[names.index(one.name), bool(one.shape.room)][x(one)].append(value)
    return [
        Curve(
            names[colour] + (" with room" if has_room else ""),
            [(place, sorted(values)[len(values) // 2]) for place, values in sorted(points.items())],
            colour,
            dashed=has_room,
        )
        for (colour, has_room), points in sorted(found.items())
    ]


def _median(result: Result, state: State) -> float | None:
    timed = result.time(*state)
    return timed.median_us if timed is not None else None


def _longest(result: Result) -> float:
    return float(result.shape.longest)


def _num_seqs(result: Result) -> float:
    """Without those of one token, which only fill a batch up. The longest of a ragged batch says little."""
    return float(sum(length > 1 for length in result.shape.seq_lens))


def _x_label(results: Sequence[Result]) -> str:
    return "tokens merged" if results[0].shape.kind == "merge" else "tokens of the longest sequence"


def _group(result: Result, *, is_ragged: bool) -> str:
    """What is drawn together: the same heads, batch and pages."""
    shape = result.shape
    if shape.kind == "merge":
        return f"{shape.num_q_heads} heads of {shape.head_size}"
    if is_ragged:
        return f"ragged batches, {shape.queries.count(1) / len(shape.queries):.0%} decode"
    return f"{shape.num_q_heads}/{shape.num_kv_heads} heads, batch {len(shape.seq_lens)}"


@contextmanager
def _settings(*, salt: str) -> Iterator[None]:
    """Texts stay texts, without formulas in them: a kernel may be called anything. ``salt``: of ids within a page."""
    import matplotlib as mpl

    with mpl.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": salt,
            "text.parse_math": False,
            "font.size": 9,
            "text.color": _INK,
            "axes.labelcolor": _INK,
            "axes.edgecolor": _INK,
            "xtick.color": _INK,
            "ytick.color": _INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    ):
        yield


def _figure(charts: Sequence[Chart], columns: int = 2) -> Figure:
    """So many plots a row, each with its own key."""
    from matplotlib.figure import Figure

    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(columns * _INCHES[0], rows * _INCHES[1]), layout="constrained")
    for i, chart in enumerate(charts):
        axes = figure.add_subplot(rows, columns, i + 1)
        _frame(axes, chart)
        drawn = []
        for line in chart.lines:
            xs, ys = zip(*line.points, strict=True)
            shape = "o" if line.scattered else "o--" if line.dashed else "o-"
            drawn += axes.plot(xs, ys, shape, color=_COLOURS[line.colour], markersize=3, linewidth=1.5)
        axes.legend(drawn, [only_printable(line.name) for line in chart.lines], fontsize=7, frameon=False)
    return figure


def _frame(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter

    axes.set_title(chart.title, loc="left", fontweight="bold")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(alpha=0.25)
    if chart.ceiling is not None:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.axhline(chart.ceiling, color=_CEILING, linestyle=":", linewidth=1)
        axes.annotate(chart.limit, (0.01, chart.ceiling), xycoords=("axes fraction", "data"), va="bottom")
        axes.set_ylim(0, 1.15 * max(chart.ceiling, *(y for line in chart.lines for _, y in line.points)))
    else:
        axes.set_xscale("log", base=2)  # lengths are powers of two
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())


@dataclass(frozen=True, slots=True)
class Section:
    """One suite. ``references``: short names of what others are set against, by contender."""

    suite: str
    plots: Markup | None
    lines: list[str]
    results: list[Result]
    states: list[State]
    references: dict[str, str]

    def state_of(self, result: Result) -> State:
        """The launch and cache that ratios of ``result`` are of: the first in which it was timed."""
        return next((one for one in self.states if result.time(*one) is not None), ("graph", "cold"))


def bench_page(report: Report) -> str:
    """The page; without matplotlib it says so in the place of the plots."""
    return rendered(
        "bench.html.jinja",
        report=report,
        parts=[part for suite in report.suites if (part := _part(report, suite)).results],
        why_no_plots="" if can_plot() else NO_MATPLOTLIB,
        ratio_to=ratio_to,
        options_text=options_text,
        varied=varied_options(report),
    )


def _part(report: Report, suite: str) -> Section:
    results = [one for one in report.chosen(suite) if one.status != "unsupported"]
    timed = {one.contender for one in results if one.times}
    return Section(
        suite=suite,
        plots=plots_svg(report, suite) if can_plot() else None,
        lines=summary_of(report, suite),
        results=results,
        states=states_of(results),
        references={name: short for name, short in REFERENCES.items() if name in timed},
    )
