"""The charts of kernel times: latency over length, bandwidth over bytes, and the seeds' own comparison."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from attnfuzz.bench.kernels.results import Report, Result, State
from attnfuzz.report.bench import states_of
from attnfuzz.report.chart import MOST_LINES, Chart, Line

__all__ = ["charts_of"]


def charts_of(report: Report, suite: str) -> list[Chart]:
    """Charts of the suite's timed results, in the first state of launch and cache in which anything was timed.

    What has only one length is no line, and left out. Over lengths only the suite's first page size is drawn; all are
    in the chart of the bandwidth.
    """
    results = [one for one in report.chosen(suite) if one.times]
    states = states_of(results)
    if not states:
        return []
    state, names = states[0], _names(results)
    said = f"{'CUDA graph' if state[0] == 'graph' else 'eager'}, L2 {state[1]}"
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.shape.block_size == results[0].shape.block_size:
            groups[_group(result)].append(result)
    charts = [
        Chart(group, _x_label(some), f"microseconds, {said}", _lines(some, names, _x, partial(_median, state=state)))
        for group, some in groups.items()
    ]
    speeds = _lines(results, names, lambda one: float(one.nbytes), lambda one: one.gigabytes_per_s(*state))
    bandwidth = Chart("bandwidth", "bytes to move", f"GB/s, {said}", speeds, True, (report.peak_gb_s, "copy"))
    return [chart for chart in (*charts, bandwidth) if any(len(line.points) > 1 for line in chart.lines)]


def _names(results: Sequence[Result]) -> list[str]:
    """Contenders in the order of their colours: the same one has the same colour in all charts of a suite."""
    return list(dict.fromkeys(one.contender for one in results))[:MOST_LINES]


def _lines(
    results: Sequence[Result],
    names: Sequence[str],
    x: Callable[[Result], float],
    y: Callable[[Result], float | None],
) -> list[Line]:
    """One for each contender, and a dashed one for its graph with room for more; medians where an x comes again."""
    found: dict[tuple[int, bool], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in results:
        if one.contender in names and (value := y(one)) is not None:
            found[names.index(one.contender), bool(one.shape.room)][x(one)].append(value)
    return [
        Line(
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


def _x(result: Result) -> float:
    return float(result.shape.longest)


def _x_label(results: Sequence[Result]) -> str:
    return "tokens merged" if results[0].shape.kind == "merge" else "tokens of the longest sequence"


def _group(result: Result) -> str:
    """What is drawn together: the same heads, batch and pages."""
    shape = result.shape
    if shape.kind == "merge":
        return f"{shape.num_q_heads} heads of {shape.head_size}"
    if shape.kind == "mixed":
        return "half prompts, half decode"
    return f"{shape.num_q_heads}/{shape.num_kv_heads} heads, batch {len(shape.seq_lens)}"
