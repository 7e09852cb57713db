"""Times of kernels as one HTML page that needs nothing else, light or dark as the reader's screen is."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from attnfuzz.bench.kernels.measurements import Report, Result, State
from attnfuzz.report.bench import REFERENCES, options_text, ratio_to, states_of, summary_of, varied_options
from attnfuzz.report.bench_plots import NO_MATPLOTLIB, can_plot, plots_svg
from attnfuzz.report.files import rendered

__all__ = ["bench_page"]


@dataclass(frozen=True, slots=True)
class Part:
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


def _part(report: Report, suite: str) -> Part:
    results = [one for one in report.chosen(suite) if one.status != "unsupported"]
    timed = {one.contender for one in results if one.times}
    return Part(
        suite=suite,
        plots=plots_svg(report, suite) if can_plot() else None,
        lines=summary_of(report, suite),
        results=results,
        states=states_of(results),
        references={name: short for name, short in REFERENCES.items() if name in timed},
    )
