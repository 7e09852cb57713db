"""Output of ``attnfuzz bench``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnfuzz.bench.kernels.run import versions_text
from attnfuzz.bench.kernels.shapes import STATES, MachineReply, Report, Result, State
from attnfuzz.declaration import Declaration
from attnfuzz.problems.supports import OptionValue

_REFERENCES = {
    "vllm:flash_attention_3": "FA3",
    "vllm:flash_mla": "FlashMLA",
    "flashinfer:batch_decode": "FlashInfer",
    "flashinfer:batch_prefill": "FlashInfer",
    "torch:sdpa": "SDPA",
    "torch:varlen": "varlen",
    "flashinfer:merge_state": "FlashInfer",
    "vllm:merge_attn_states": "vLLM",
}
"""Contenders that the others are set against, with a short name."""


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
    """A table for each suite, and which options all its rows were timed with.

    Ratios and the share of a copy are those of the first state of launch and cache.
    """
    console.print(Text(f"copy: {report.peak_gb_s:,.0f} GB/s, read and written"))
    for suite in report.suites:
        results = [one for one in report.chosen(suite) if one.status != "unsupported"]
        if results:
            console.print()
            console.print(_suite_table(report, suite, results))
            for line in _fixed_options(report, [one for one in results if one.times]):
                console.print(Text(line))
    if report.unreached:
        console.print(Text(f"{report.unreached} not begun: the budget was spent; raise --budget", "yellow"))


def _states_of(results: Sequence[Result]) -> list[State]:
    """Launch and cache, as far as anything was timed with them."""
    return [(mode, l2) for mode, l2 in STATES if any(one.time(mode, l2) is not None for one in results)]


def _ratio_to(report: Report, result: Result, reference: str, state: State) -> float | None:
    """The median over that of ``reference`` on the same shape; None if one of them has none."""
    mine = result.time(*state)
    other = next(
        (one for one in report.chosen(result.suite) if one.contender == reference and one.shape == result.shape), None
    )
    timed = other.time(*state) if other is not None else None
    return mine.median_us / timed.median_us if mine is not None and timed is not None and timed.median_us else None


def _varied_options(report: Report) -> dict[str, frozenset[str]]:
    """Options of each contender of which several values were tried: the others say nothing about a time."""
    values: dict[str, dict[str, set[OptionValue]]] = defaultdict(lambda: defaultdict(set))
    for result in report.results:
        for name, value in result.options.items():
            values[result.contender][name].add(value)
    return {
        contender: frozenset(name for name, tried in options.items() if len(tried) > 1)
        for contender, options in values.items()
    }


def _options_text(result: Result, varied: dict[str, frozenset[str]]) -> str:
    """``num_splits=8 tile=32``, of what was ``varied``."""
    shown = varied.get(result.contender, frozenset())
    return " ".join(f"{name}={value}" for name, value in result.options.items() if name in shown)


def _suite_table(report: Report, suite: str, results: Sequence[Result]) -> Table:
    states = _states_of(results)
    references = [name for name in _REFERENCES if any(one.contender == name and one.times for one in results)]
    table = Table(title=f"{suite}: microseconds of one call", box=None, pad_edge=False, header_style="bold")
    table.title_justify = "left"
    table.add_column("shape", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    columns = [f"{mode} {l2}" for mode, l2 in states] + ["% of copy"]
    for name in (*columns, *(f"x {_REFERENCES[name]}" for name in references)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")  # the only one that may wrap: a long remark would take the room of the others
    varied = _varied_options(report)
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
        ratio = _ratio_to(report, result, name, state)
        yield "-" if ratio is None else f"{ratio:.2f}"


def _remark(result: Result, varied: dict[str, frozenset[str]]) -> Text:
    if result.status != "ok":
        return Text(f"{result.status.upper()}: {result.note}", "bold red")
    return Text(" ".join(filter(None, (_options_text(result, varied), result.note))), "dim")


def _fixed_options(report: Report, results: Sequence[Result]) -> Iterator[str]:
    """Options that have one value throughout: rows of a table only have those that differ."""
    varied = _varied_options(report)
    for name, options in {one.contender: one.options for one in results}.items():
        fixed = [f"{option}={value}" for option, value in options.items() if option not in varied[name]]
        if fixed:
            yield f"{name}: timed with {' '.join(fixed)}; --option tries others"
