"""What ``attnfuzz bench`` prints: its tables, and in sentences what a suite of kernel times was run for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnfuzz.bench.endurance import Endurance
from attnfuzz.bench.first_minute import FirstMinute
from attnfuzz.bench.kernels.measurements import STATES, MachineReply, Report, Result, State
from attnfuzz.bench.kernels.run import versions_text
from attnfuzz.bench.throughput import Measured, MeasuredCampaign, Setting
from attnfuzz.declaration import Declaration
from attnfuzz.problems.supports import OptionValue

__all__ = [
    "REFERENCES",
    "BenchProgress",
    "options_text",
    "print_endurance",
    "print_first_minute",
    "print_machine",
    "print_report",
    "print_row",
    "print_setting",
    "print_throughput",
    "ratio_to",
    "states_of",
    "summary_of",
    "varied_options",
]


def print_setting(console: Console, setting: Setting) -> None:
    """What is measured, and where."""
    console.print(Text(f"{len(setting.kernels)} kernels on {setting.device_name}, {setting.cores} CPU cores"))


def print_row(console: Console, row: Measured) -> None:
    """One measurement, as soon as there is one."""
    console.print(Text(f"{row.name}: {row.rate:.1f} cases/s"))
    console.file.flush()


def print_throughput(console: Console, rows: Sequence[Measured]) -> None:
    """All measurements beside the first one, and where the time of the campaigns went."""
    table = _table("measurement", "cases/s", "over the first", "cases", "found")
    for row in rows:
        cases = "" if row.measured is None else str(sum(row.measured.cases.values()))
        found = "" if row.measured is None else str(_counting(row.measured))
        table.add_row(
            row.name, f"{row.rate:.1f}", f"{row.rate / rows[0].rate:.2f}" if rows[0].rate else "-", cases, found
        )
    console.print()
    console.print(table)
    for row in rows:
        if row.measured is not None:
            console.print()
            console.print(Text(row.name, style="bold"))
            console.print(_shares(row.measured))


def _counting(measured: MeasuredCampaign) -> int:
    """Findings that are not possibly out of contract."""
    result = measured.result
    return sum(result.statistics.standing(finding) == "counts" for finding in result.findings)


def print_endurance(console: Console, endured: Endurance) -> None:
    """What was found on the hostile kernels, what they cost the others, and the memory over time."""
    table = _table("hostile kernel", "found")
    for name, found in endured.found.items():
        table.add_row(name, ", ".join(found) or "nothing")
    console.print(table)
    together = endured.together.rate_of(endured.targets)
    console.print(
        Text(
            f"the other kernels: {endured.alone.rate:.1f} cases/s alone, {together:.1f} beside the hostile ones at the "
            f"same time ({endured.rate_kept:.0%})"
        )
    )
    for stray in endured.strays:
        console.print(Text(f"found on a healthy kernel: {stray}", style="bold red"))
    console.print(Text(f"memory of the processes beside them (MiB), in tenths of the time: {_tenths(endured)}"))


def print_first_minute(console: Console, measured: FirstMinute) -> None:
    """One campaign as a person saw it, as soon as it has ended."""
    summary = measured.summary
    first_case = "never" if summary.first_case_s is None else f"{summary.first_case_s:.1f} s"
    first_line = "never" if measured.first_line_s is None else f"{measured.first_line_s:.1f} s"
    console.print(
        Text(
            f"{'compiled before' if measured.warm else 'nothing compiled'}, on {summary.device}: "
            f"first line {first_line}, first case {first_case}, {summary.first_minute:,} cases in 60 s, "
            f"{summary.cases:,} in all, {100 * summary.compiling:.0f}% of the time compiling, over after "
            f"{measured.wall_s:.1f} s"
        ),
        soft_wrap=True,
    )
    for seen_s, shrunk_s, target, cause in measured.found:
        shrunk = "not shrunk" if shrunk_s is None else f"shrunk after {shrunk_s:.1f} s"
        console.print(Text(f"   {seen_s:6.1f} s  {target}  {cause} ({shrunk})"), soft_wrap=True)
    console.file.flush()


def _tenths(endured: Endurance) -> str:
    """The median of the samples in each tenth of the time: single samples may catch the leaking kernel at its worst."""
    if not endured.memory:
        return "not sampled"
    last = endured.memory[-1].seconds
    groups: list[list[int]] = [[] for _ in range(10)]
    for sample in endured.memory:
        groups[min(9, int(10 * sample.seconds / last))].append(sample.nbytes) if last else None
    return " ".join(f"{sorted(group)[len(group) // 2] / 2**20:.0f}" if group else "-" for group in groups)


def _shares(measured: MeasuredCampaign) -> Table:
    """Where the time of the workers went, as shares and per case."""
    statistics = measured.result.statistics
    kernels = statistics.kernels.values()
    cases = max(1, statistics.cases)
    total = statistics.workers * measured.campaign_s
    parts = {
        "compiling kernels": sum(one.compile_s for one in kernels),
        "running kernels": sum(one.kernel_s for one in kernels),
        "reference and bounds": sum(one.reference_s for one in kernels),
        "harness: building inputs": sum(one.build_s for one in kernels),
    }
    judging = sum(one.seconds for one in kernels)
    parts["harness: comparing, messages"] = judging - sum(parts.values())
    parts["harness: drawing and the rest"] = max(0.0, total - judging)  # what a batch took is known at its end
    table = _table("where a worker's time goes", "share", "ms per case")
    for name, seconds in parts.items():
        table.add_row(name, f"{seconds / total:.1%}" if total else "-", f"{1000 * seconds / cases:.3f}")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


REFERENCES = {
    "vllm:flash_attention_3": "FA3",
    "flashinfer:batch_decode": "FlashInfer",
    "flashinfer:batch_prefill": "FlashInfer",
    "torch:sdpa": "SDPA",
    "torch:varlen": "varlen",
    "flashinfer:merge_state": "FlashInfer",
    "vllm:merge_attn_states": "vLLM",
}
"""What the others are set against, with a short name."""


def print_machine(
    console: Console, machine: MachineReply, references: Sequence[Declaration], absent: Sequence[str] = ()
) -> None:
    """Where it runs, and what there is to compare with."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    console.print(
        Text(f"{machine.name}, {machine.processors} processors, L2 {machine.l2_bytes / 2**20:.0f} MiB; {versions}")
    )
    for one in references:
        console.print(Text(f"  {one.target:<32}{versions_text(one)}"))
    for sentence in absent:
        console.print(Text(f"  left out: {sentence}", "yellow"), soft_wrap=True)
    if machine.device == "cpu":
        console.print(Text("Triton's interpreter: this shows that everything runs; the times say nothing", "yellow"))
    console.file.flush()


class BenchProgress:
    """A line for each contender and shape."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, result: Result) -> None:
        """Print it."""
        if result.status == "unsupported":
            return
        shown = ", ".join(
            f"{mode} {l2} {timed.median_us:.1f}" for mode, l2 in STATES if (timed := result.time(mode, l2)) is not None
        )
        note = result.note if result.status == "ok" else f"{result.status.upper()} {result.note}"
        text = "  ".join(filter(None, (f"{result.shape.label:<16} {result.contender:<32} {shown}", note)))
        self._console.print(Text(text), overflow="ellipsis", no_wrap=True)
        self._console.file.flush()


def print_report(console: Console, report: Report) -> None:
    """A table for each suite, with the sentences of `summary_of` below it.

    Ratios and the share of a copy are those of the first state of launch and cache.
    """
    console.print(Text(f"copy: {report.peak_gb_s:,.0f} GB/s, read and written"))
    for suite in report.suites:
        results = [one for one in report.chosen(suite) if one.status != "unsupported"]
        if results:
            console.print()
            console.print(_suite_table(report, suite, results))
            for line in summary_of(report, suite):
                console.print(Text(line))
    if report.unreached:
        console.print(Text(f"{report.unreached} not begun: the budget was spent; raise --budget", "yellow"))


def states_of(results: Sequence[Result]) -> list[State]:
    """Launch and cache, as far as anything was timed with them."""
    return [(mode, l2) for mode, l2 in STATES if any(one.time(mode, l2) is not None for one in results)]


def ratio_to(report: Report, result: Result, reference: str, state: State) -> float | None:
    """The median over that of ``reference`` on the same shape; None if one of them has none."""
    mine = result.time(*state)
    other = next(
        (one for one in report.chosen(result.suite) if one.contender == reference and one.shape == result.shape), None
    )
    timed = other.time(*state) if other is not None else None
    return mine.median_us / timed.median_us if mine is not None and timed is not None and timed.median_us else None


def varied_options(report: Report) -> dict[str, frozenset[str]]:
    """Of each contender, the options of which several values were tried: the others say nothing about a time."""
    values: dict[str, dict[str, set[OptionValue]]] = defaultdict(lambda: defaultdict(set))
    for result in report.results:
        for name, value in result.options.items():
            values[result.contender][name].add(value)
    return {
        contender: frozenset(name for name, tried in options.items() if len(tried) > 1)
        for contender, options in values.items()
    }


def options_text(result: Result, varied: dict[str, frozenset[str]]) -> str:
    """``num_splits=8 tile=32``, of what was ``varied``."""
    shown = varied.get(result.contender, frozenset())
    return " ".join(f"{name}={value}" for name, value in result.options.items() if name in shown)


def _suite_table(report: Report, suite: str, results: Sequence[Result]) -> Table:
    states = states_of(results)
    references = [name for name in REFERENCES if any(one.contender == name and one.times for one in results)]
    table = Table(title=f"{suite}: microseconds of one call", box=None, pad_edge=False, header_style="bold")
    table.title_justify = "left"
    table.add_column("shape", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    columns = [f"{mode} {l2}" for mode, l2 in states] + ["% of copy"]
    for name in (*columns, *(f"x {REFERENCES[name]}" for name in references)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")  # the only one that may wrap: a long remark would take the room of the others
    varied = varied_options(report)
    before = ""
    for result in results:
        label = result.shape.label if result.shape.label != before else ""
        before = result.shape.label
        table.add_row(label, result.contender, *_numbers(report, result, states, references), _remark(result, varied))
    return table


def _numbers(report: Report, result: Result, states: Sequence[State], references: Sequence[str]) -> Iterator[str]:
    for state in states:
        timed = result.time(*state)
        yield "-" if timed is None else f"{timed.median_us:.1f}"
    state = next((one for one in states if result.time(*one) is not None), ("graph", "cold"))
    share = result.share_of_copy(*state)
    yield "-" if share is None else f"{100 * share:.0f}"
    for name in references:
        ratio = ratio_to(report, result, name, state)
        yield "-" if ratio is None else f"{ratio:.2f}"


def _remark(result: Result, varied: dict[str, frozenset[str]]) -> Text:
    if result.status != "ok":
        return Text(f"{result.status.upper()}: {result.note}", "bold red")
    return Text(" ".join(filter(None, (options_text(result, varied), result.note))), "dim")


_SHORT, _LONG = 512, 4096
"""Between which lengths splitting should hide the growth."""

_LARGE_MERGE = 4096


def summary_of(report: Report, suite: str) -> list[str]:
    """Of the suite's timed results, launched in the first way in which anything was timed, cold and warm.

    Options that have one value throughout come last; rows of a table only have those that differ.
    """
    results = [one for one in report.chosen(suite) if one.times]
    states = states_of(results)
    states = [state for state in states if state[0] == states[0][0]]
    names = list(dict.fromkeys(one.contender for one in results))
    facts = [
        f"{name}{f' (L2 {state[1]})' if len(states) > 1 else ''}: {', '.join(found)}"
        for name in names
        for state in states
        if (found := list(_facts(report, [one for one in results if one.contender == name], state)))
    ]
    return [*facts, *_fixed_options(report, results)]


def _facts(report: Report, mine: Sequence[Result], state: State) -> Iterator[str]:
    for name in REFERENCES:
        ratios = [ratio for one in mine if (ratio := ratio_to(report, one, name, state)) is not None]
        if ratios and mine[0].contender != name:
            yield f"{_span(ratios)} times {REFERENCES[name]}"
    shares = [
        share
        for one in mine
        if one.shape.num_tokens >= _LARGE_MERGE and (share := one.share_of_copy(*state)) is not None
    ]
    if shares:
        yield f"{min(shares):.0%} of a copy's bandwidth or more from {_LARGE_MERGE} tokens on"
    yield from _growth(mine, state)
    rooms = [ratio for one in mine if one.shape.room and (ratio := _over_exact(one, mine, state)) is not None]
    if rooms:
        yield f"one graph for all lengths takes {_span(rooms)} times one made for the length"


def _fixed_options(report: Report, results: Sequence[Result]) -> Iterator[str]:
    varied = varied_options(report)
    for name, options in {one.contender: one.options for one in results}.items():
        fixed = [f"{option}={value}" for option, value in options.items() if option not in varied[name]]
        if fixed:
            yield f"{name}: timed with {' '.join(fixed)}; --option tries others"


def _growth(mine: Sequence[Result], state: State) -> Iterator[str]:
    """How much longer 4,096 tokens take than 512, for a single sequence."""
    for heads in dict.fromkeys((one.shape.num_q_heads, one.shape.num_kv_heads) for one in mine):
        by_length = {
            one.shape.longest: timed.median_us
            for one in mine
            if len(one.shape.seq_lens) == 1
            and not one.shape.room
            and (one.shape.num_q_heads, one.shape.num_kv_heads) == heads
            and (timed := one.time(*state)) is not None
        }
        if _SHORT in by_length and _LONG in by_length:
            grown = by_length[_LONG] / by_length[_SHORT] - 1
            yield f"{grown:+.0%} from {_SHORT} to {_LONG} tokens with {heads[0]}/{heads[1]} heads"


def _over_exact(one: Result, mine: Sequence[Result], state: State) -> float | None:
    """The time over that with a table and a graph made for the length."""
    exact = replace(one.shape, room=0, label="")
    other = next((each for each in mine if replace(each.shape, label="") == exact), None)
    timed, reference = one.time(*state), other.time(*state) if other is not None else None
    return timed.median_us / reference.median_us if timed is not None and reference is not None else None


def _span(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"
