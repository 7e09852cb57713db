"""What a suite was run for, in a sentence for each kernel, and the options that it was run with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from attnfuzz.bench.kernels.results import Report, Result, State
from attnfuzz.report.bench_kernels import REFERENCES, ratio_to, states_of, varied_options

__all__ = ["summary_of"]

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
