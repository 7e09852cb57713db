"""Times of kernels as one HTML page that needs nothing else, light or dark as the reader's screen is."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from attnfuzz.bench.kernels.measurements import Report, Result, State
from attnfuzz.report.bench import REFERENCES, options_text, ratio_to, states_of, summary_of, varied_options
from attnfuzz.report.bench_plots import NO_MATPLOTLIB, can_plot, plots_svg
from attnfuzz.report.files import rendered

__all__ = ["bench_page"]


Cell = tuple[str, str]
"""A number and what is said when the pointer rests on it."""


@dataclass(frozen=True, slots=True)
class Part:
    """One suite as the template shows it."""

    suite: str
    plots: Markup | None
    lines: list[str]
    columns: list[str]
    rows: list[tuple[str, list[Cell], str, str]]
    """Label and contender, numbers, remark, and a class: "bad", "other" for a reference, or ""."""


def bench_page(report: Report) -> str:
    """The page; without matplotlib it says so in the place of the plots."""
    parts = [part for suite in report.suites if (part := _part(report, suite)).rows]
    return rendered("bench.html.jinja", report=report, parts=parts, why_no_plots="" if can_plot() else NO_MATPLOTLIB)


def _part(report: Report, suite: str) -> Part:
    results = [one for one in report.chosen(suite) if one.status != "unsupported"]
    states = states_of(results)
    references = [name for name in REFERENCES if any(one.contender == name and one.times for one in results)]
    varied = varied_options(report)
    return Part(
        suite=suite,
        plots=plots_svg(report, suite) if can_plot() else None,
        lines=summary_of(report, suite),
        columns=[
            *(f"{mode}, {l2} (µs)" for mode, l2 in states),
            *("copy (µs)", "% of copy", "GB/s"),
            *(f"× {REFERENCES[name]}" for name in references),
        ],
        rows=[
            (
                f"{one.shape.label}|{one.contender}",
                _numbers(report, one, states, references),
                _remark(one, varied),
                _mood(one),
            )
            for one in results
        ],
    )


def _numbers(report: Report, result: Result, states: list[State], references: list[str]) -> list[Cell]:
    numbers: list[Cell] = []
    for state in states:
        timed = result.time(*state)
        spread = "" if timed is None else f"10th to 90th percentile: {timed.p10_us:.1f} to {timed.p90_us:.1f}"
        numbers.append(("-" if timed is None else f"{timed.median_us:.1f}", spread))
    state = next((one for one in states if result.time(*one) is not None), ("graph", "cold"))
    speed, share = result.gigabytes_per_s(*state), result.share_of_copy(*state)
    numbers.append(("-" if result.copy_us is None else f"{result.copy_us:.1f}", ""))
    numbers.append(("-" if share is None else f"{100 * share:.0f}", ""))
    numbers.append(("-" if speed is None else f"{speed:,.0f}", ""))
    ratios = [ratio_to(report, result, name, state) for name in references]
    return numbers + [("-" if ratio is None else f"{ratio:.2f}", "") for ratio in ratios]


def _remark(result: Result, varied: dict[str, frozenset[str]]) -> str:
    said = result.note if result.status == "ok" else f"{result.status}: {result.note}"
    return ", ".join(filter(None, (options_text(result, varied), said)))


def _mood(result: Result) -> str:
    return "bad" if result.status != "ok" else "other" if result.is_reference else ""
