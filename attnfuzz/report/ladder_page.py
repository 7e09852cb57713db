"""What ``attnfuzz bench ladder`` measured as a page in Markdown with pictures, for the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from attnfuzz.bench.kernels.ladder import FIGURES, SUITES_OF_STEPS
from attnfuzz.bench.kernels.measurements import Mode, Report, Result, State
from attnfuzz.bench.kernels.shapes import SUITES, operations
from attnfuzz.report.bench import states_of
from attnfuzz.report.bench_page import Chart, Curve, charts_of, drawn_svg
from attnfuzz.untrusted_text import only_printable

__all__ = ["PICTURES", "ladder_page"]

PICTURES = "pictures"
"""The folder of the pictures, beside the page."""

_SHARES = dict(zip(SUITES_OF_STEPS, ("0 % decode", "50 % decode", "100 % decode"), strict=True))
_RIVALS = ("FA3", "FlashInfer")


@dataclass(frozen=True, slots=True)
class _Section:
    """``told``: what is measured, and what the source document says of it. ``found``: sentences on the results."""

    name: str
    title: str
    suites: tuple[str, ...]
    told: str
    charts: Callable[[Report], list[Chart]]
    found: Callable[[Report], Iterator[str]]


def ladder_page(report: Report) -> tuple[str, dict[str, bytes]]:
    """The page, and its pictures by their names. Raises ImportError without matplotlib."""
    pictures: dict[str, bytes] = {}
    parts = [_head(report)]
    for section in _SECTIONS:
        charts = section.charts(report)
        tables = [table for suite in section.suites for table in _tables(report, suite)]
        if not charts and not tables:
            continue
        lines = [f"## {section.title}", section.told]
        if charts:
            name = f"ladder-{section.name}.svg"
            pictures[name] = drawn_svg(charts, salt=section.name, columns=min(len(charts), 2)).encode()
            lines.append(f"![{section.title}]({PICTURES}/{name})")
        parts += [*lines, *section.found(report), *tables]
    parts += _failures(report)
    return "\n\n".join(parts) + "\n", pictures


def _head(report: Report) -> str:
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    engines = ", ".join(sorted(set(report.references.values()))) or "no engine"
    cut = f" {report.unreached} measurements were not reached." if report.unreached else ""
    if machine.device == "cpu":
        cut += " **All of it in Triton's interpreter: the times say nothing.**"
    return (
        "# The ladder of kernels, measured\n\n"
        "`attnfuzz bench ladder --json ladder.json --page docs/ladder.md` measured all of this on one GPU and wrote "
        "this page; `attnfuzz bench ladder ladder.json --page docs/ladder.md` writes it again. Every result was "
        "compared with float64 before it was timed.\n\n"
        f"{_text(report.started[:10])}, {_text(machine.name)}, {_text(versions)}; beside: {_text(engines)}. A copy "
        f"reaches {report.peak_gb_s:,.0f} GB/s, a product of large float16 matrices {report.peak_tflop_s:,.3g} "
        "TFLOP/s. Llama-3.1-8B's heads (32 on 8, of 128), float16 and pages of 16 where nothing else is said. A time "
        f"is the median of a call in a CUDA graph, in microseconds, with keys and values in memory.{cut}"
    )


def _tables(report: Report, suite: str) -> Iterator[str]:
    """One for each way of launching: a row a shape, a column a step."""
    results = _timed(report, suite)
    names = list(dict.fromkeys(one.name for one in report.chosen(suite) if one.times))
    for state in states_of(results):
        by_place = {(one.shape.label, one.name): one for one in results}
        said = _SHARES.get(suite, suite) + {"eager": ", launched one by one", "graph": ""}[state[0]]
        rows = [
            [label, *(_microseconds(by_place.get((label, name)), state) for name in names)]
            for label in dict.fromkeys(one.shape.label for one in results)
        ]
        yield _table([f"{said}, µs", *names], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(_text(cell) for cell in line)} |" for line in lines)


def _text(text: str) -> str:
    """What came from a file or a device, as Markdown that is nothing but text."""
    return only_printable(text).replace("|", "\\|").replace("<", "&lt;")


def _microseconds(result: Result | None, state: State) -> str:
    timed = result.time(*state) if result is not None else None
    return "" if timed is None else f"{timed.median_us:,.1f}"


def _timed(report: Report, suite: str) -> list[Result]:
    """In the order of the suite, not of the measurements."""
    order = {shape.label: place for place, shape in enumerate(SUITES[suite]())}
    found = [one for one in report.chosen(suite) if one.times]
    return sorted(found, key=lambda one: order.get(one.shape.label, len(order)))


def _times(report: Report, suite: str) -> dict[tuple[str, str], float]:
    """Microseconds by shape and step, in the first of the states that matter most to a server."""
    return {
        (one.shape.label, one.name): next(
            timed.median_us for state in states_of([one]) if (timed := one.time(*state)) is not None
        )
        for one in _timed(report, suite)
    }


def _names(times: Iterable[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for _, name in times))


def _gains(times: dict[tuple[str, str], float], before: str, after: str) -> list[float]:
    """How many times as fast a step is as another, on each shape."""
    return [
        us / times[label, after] for (label, name), us in times.items() if name == before and (label, after) in times
    ]


def _span(ratios: Sequence[float], unit: str = " x") -> str:
    """The median, and from where to where."""
    if not ratios:
        return ""
    middle = f"{statistics.median(ratios):.2f}{unit}"
    return middle if len(ratios) == 1 else f"{middle} ({min(ratios):.2f} to {max(ratios):.2f})"


def _steps_found(report: Report) -> Iterator[str]:
    """How much faster each step is than the one before it, and the first and the last ones than engines."""
    own = [step.name for step in FIGURES[0].steps if ":" not in step.kernel]
    pairs = {f"{before} → {after}": (before, after) for before, after in pairwise(own)}
    pairs |= {f"{name}, times {rival}'s speed": (rival, name) for rival in _RIVALS for name in (own[0], *own[-2:])}
    times = [_times(report, suite) for suite in SUITES_OF_STEPS]
    rows = [[told, *(_span(_gains(of_suite, *pair)) for of_suite in times)] for told, pair in pairs.items()]
    yield "How many times as fast each step is as the one before (median over batches, from the least to the most):"
    yield _table(["step", *_SHARES.values()], [row for row in rows if any(row[1:])])


_PROMPT = 500


def _shares(report: Report, mode: Mode) -> dict[str, list[tuple[float, float]]]:
    """Of each step, output tokens and FA3's time for all of them over the step's, in percent."""
    totals: dict[str, dict[int, float]] = {}
    results = _timed(report, "output")
    for name in dict.fromkeys(one.name for one in results):
        times = [
            (one.shape.longest, timed.median_us)
            for one in results
            if one.name == name and (timed := one.time(mode, "cold")) is not None
        ]
        total, totals[name] = 0.0, {}
        for (start, first), (end, last) in pairwise(times):
            total += (end - start) * (first + last) / 2  # a call for each token, whose time grows evenly between
            totals[name][end - _PROMPT] = total
    best = totals.pop("FA3", {})
    return {
        name: [(float(tokens), 100 * best[tokens] / total) for tokens, total in found.items() if tokens in best]
        for name, found in totals.items()
    }


_LAUNCHED: dict[Mode, str] = {"graph": "in one CUDA graph for all lengths", "eager": "launched one by one"}


def _output_charts(report: Report) -> list[Chart]:
    """Without FlashAttention 3, times over lengths."""
    shares = [
        Chart(
            f"attention of one sequence, {text}",
            "output tokens after a prompt of 500",
            "% of FlashAttention 3's speed, launched likewise",
            lines,
            100.0,
            "FlashAttention 3",
        )
        for mode, text in _LAUNCHED.items()
        if (lines := [Curve(name, at, i) for i, (name, at) in enumerate(_shares(report, mode).items()) if at])
    ]
    return shares or _curves_of("output")(report)


def _output_found(report: Report) -> Iterator[str]:
    for mode, said in _LAUNCHED.items():
        shares = {name: at for name, at in _shares(report, mode).items() if at}
        if shares:
            tokens = max(at[-1][0] for at in shares.values())
            each = ", ".join(f"{_text(name)} {at[-1][1]:.1f} %" for name, at in shares.items())
            yield f"Speed over {tokens:,.0f} output tokens as a share of FlashAttention 3's, {said}: {each}."


def _qwen_found(report: Report) -> Iterator[str]:
    times = _times(report, "qwen")
    ends = "12/2 128", "12/2 4096"
    grown = {name: [times[end, name] for end in ends if (end, name) in times] for name in _names(times)}
    told = [f"{_text(name)} {us[1] / us[0] - 1:+.0%}" for name, us in grown.items() if len(us) == 2]
    if told:
        yield f"From 128 to 4,096 tokens with 12 heads on 2: {', '.join(told)}."
    long = {shape.label for shape in SUITES["qwen"]() if shape.longest >= 1024}
    times = {place: us for place, us in times.items() if place[0] in long}
    pairs = (*pairwise(("simple", "paged", "split-K", "grouped")), ("v1", "v2"), ("paged", "v2"))
    rows = [[" → ".join(pair), _span(gains)] for pair in pairs if (gains := _gains(times, *pair))]
    if rows:
        yield _table(["how many times as fast, from 1,024 tokens on", "median (least to most)"], rows)


def _padded_found(report: Report) -> Iterator[str]:
    times, labels = _times(report, "padded"), [shape.label for shape in SUITES["padded"]()]
    pairs = list(zip(labels[::2], labels[1::2], strict=True))
    for name in _names(times):
        if ratios := [
            times[padded, name] / times[whole, name]
            for whole, padded in pairs
            if (whole, name) in times and (padded, name) in times
        ]:
            yield f"{_text(name)}: the padded batch takes {_span(ratios)} the time of the batch as it is."


def _variety_charts(report: Report) -> list[Chart]:
    """Bandwidth, without lines: its shapes have nothing in common."""
    return [
        replace(chart, lines=[replace(line, scattered=True) for line in chart.lines])
        for chart in charts_of(report, "variety")
        if chart.ceiling is not None
    ]


def _variety_found(report: Report) -> Iterator[str]:
    times = _times(report, "variety")
    best: dict[str, float] = {}
    for (label, name), us in times.items():
        if name in _RIVALS:
            best[label] = min(us, best.get(label, us))
    for name in _names(times):
        ratios = {label: us / best[label] for (label, one), us in times.items() if one == name and label in best}
        if ratios and name not in _RIVALS:
            slow = [f"{_text(label)} {ratio:.2f}" for label, ratio in ratios.items() if ratio > 1]
            yield (
                f"{_text(name)} takes {_span(list(ratios.values()))} the time of the faster of FlashAttention 3 and "
                f"FlashInfer; above 1.00 at {', '.join(slow) or 'none'}."
            )
        short, long = (times.get((f"8x{n} window 1024", name)) for n in (1024, 32768))
        if short and long:
            yield f"Behind a window of 1,024, {_text(name)} takes {long / short:.2f} times as long with 32,768 tokens."


def _roofline_charts(report: Report) -> list[Chart]:
    """Operations a second over operations a byte, of all attention that was timed with keys and values in memory."""
    points: dict[str, list[tuple[float, float]]] = {}
    for suite in (*SUITES_OF_STEPS, "variety"):
        times = _times(report, suite)
        for one in _timed(report, suite):
            work = operations(one.shape)
            speed = work / times[one.shape.label, one.name] * 1e-6
            points.setdefault(one.name, []).append((work / one.nbytes, speed))
    shown = [name for name in ("naive", "Q-Block", "static grid", "tuned", "grouped", *_RIVALS) if name in points]
    roof = [(x, min(report.peak_tflop_s, x * report.peak_gb_s * 1e-3)) for x in sorted((1.0, _ridge(report), 1024.0))]
    lines = [Curve(name, sorted(points[name]), i, scattered=True) for i, name in enumerate(shown)]
    roofline = Curve("copy and product of matrices", roof, 11, dashed=True)
    return [Chart("roofline", "operations a byte that must move", "TFLOP/s", [*lines, roofline])] if lines else []


def _ridge(report: Report) -> float:
    return report.peak_tflop_s * 1e3 / report.peak_gb_s


def _roofline_found(report: Report) -> Iterator[str]:
    yield f"The ridge is at {_ridge(report):.0f} operations a byte."


def _failures(report: Report) -> list[str]:
    """What was wrong or did not run, each once."""
    found = dict.fromkeys(
        f"- {_text(one.name)} ({_text(one.contender)}) on {_text(one.suite)}, {_text(one.shape.label)}: "
        f"{one.status}: {_text(one.note)}"
        for one in report.results
        if one.chosen and one.status not in ("ok", "unsupported")
    )
    return ["## What has no time", "\n".join(found)] if found else []


def _curves_of(*suites: str) -> Callable[[Report], list[Chart]]:
    """Their curves over lengths or batches; the roofline stands for their bandwidth."""
    names = list(dict.fromkeys(step.name for one in FIGURES if one.suite in suites for step in one.steps))
    return lambda report: [
        chart for suite in suites for chart in charts_of(report, suite, names) if chart.ceiling is None
    ]


def _nothing_found(report: Report) -> Iterator[str]:
    del report
    return iter(())


_SECTIONS = (
    _Section(
        "steps",
        "The steps, over batches of 0, 50 and 100 % decode",
        SUITES_OF_STEPS,
        "Figures 6 to 8 of arXiv 2511.11581. Lengths are ragged. *naive*: a program for each query token and head. "
        "*Q-Block*: four query tokens and a group's heads in one. *segments*: the better of 4 and 16 ranges of each "
        "sequence in parallel. *free tile*: 64 keys a step where pages have 16. *static grid*: as many programs as run "
        "at once. *tuned*: all of this chosen by the shapes of the batch. *grouped*: another kernel, for decode alone.",
        _curves_of(*SUITES_OF_STEPS),
        _steps_found,
    ),
    _Section(
        "output",
        "One sequence that grows, as a share of FlashAttention 3",
        ("output",),
        "Figure 9, of the attention alone: the times of a call at six lengths, added up over all output tokens. The "
        "document has whole models there: 19.7 % naive, 49 % with Q-Blocks, 98.6 to 105.9 % with a static grid in CUDA "
        "graphs.",
        _output_charts,
        _output_found,
    ),
    _Section(
        "splitting",
        "Splitting short and single sequences",
        ("qwen",),
        "Qwen2.5's heads, 12 on 2 and 28 on 4, with keys and values in the L2 cache where they fit. The document has "
        "+967 % from 128 to 4,096 tokens for a program a head, and +6 % for splits. *dense*, *simple* and *paged* "
        "are programs that walk a whole sequence; *v1* and *v2* are vLLM's PagedAttention, the latter in partitions of "
        "512 tokens.",
        _curves_of("qwen"),
        _qwen_found,
    ),
    _Section(
        "padded",
        "Graphs for batches of powers of two",
        ("padded",),
        "A server has a CUDA graph for each power of two and fills a batch up with sequences of one token (section "
        "6.2, and SGLang); the graph was captured with sequences of 8,192 tokens.",
        _curves_of("padded"),
        _padded_found,
    ),
    _Section(
        "variety",
        "Other dtypes, caches, heads and windows, beside engines",
        ("variety",),
        "Decode as servers have it: 8-bit caches, heads of 64 and 256, 12 on 2 and 64 on 8, a window, and one sequence "
        "of 32,768 tokens among 63 of 512.",
        _variety_charts,
        _variety_found,
    ),
    _Section(
        "merge",
        "Merging two states",
        ("merge",),
        "The source document has a Triton kernel at 3 to 5 times the speed of PyTorch's operators.",
        _curves_of("merge"),
        _nothing_found,
    ),
    _Section(
        "roofline",
        "Arithmetic intensity",
        (),
        "Decode does about four operations for each byte with four heads a group, prompts do hundreds.",
        _roofline_charts,
        _roofline_found,
    ),
)
