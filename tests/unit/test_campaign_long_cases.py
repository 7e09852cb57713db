"""attnfuzz.campaign.draw.long_cases: on a CPU too a kernel meets long sequences, if it is fast enough."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest

from attnfuzz.campaign.counts import CaseCounts
from attnfuzz.campaign.draw.long_cases import LONG_SIZES, RUNGS, LongCases, longest_sequence
from attnfuzz.campaign.draw.sampling import CaseSource
from attnfuzz.campaign.messages import Found, WorkerProgress
from attnfuzz.campaign.worker import _strategy
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import PROBLEMS, BundledProblem
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies.sizes import CPU_SIZES
from tests.unit.search_bench import WRONG, Bench, after

USUAL = CPU_SIZES.max_seq_len
FAR = 1e9


def sources() -> LongCases:
    """Of time that stands still."""
    made = (CaseSource(partial(_strategy, one), seeds=(1, one.max_seq_len)) for one in LONG_SIZES)
    return LongCases(tuple(made), clock=lambda: 0.0)


def a_kernel(problem: BundledProblem, **limits: object) -> Declaration:
    return Declaration(name="k", problem=problem, target="k.py:k", supports=Supports(**limits))  # type: ignore[arg-type]


@pytest.mark.parametrize("problem", [one for one in PROBLEMS if one != "merge_states"])
@pytest.mark.by_day("dense_decode", "paged_decode")
def test_a_fast_kernel_climbs(problem: BundledProblem) -> None:
    """Zeros from 300 or 2,000 tokens on would pass."""
    long, kernel = sources(), a_kernel(problem, head_sizes=(16,))
    first = long.due(kernel, seconds=1.0, cases=100, until=FAR)
    assert first
    assert all(USUAL < longest_sequence(case) <= RUNGS[0] for case in first)
    for _ in first:
        long.judged(kernel, RUNGS[0], 0.04, passed=True)
    second = long.due(kernel, seconds=100.0, cases=100, until=FAR)
    assert second
    assert all(RUNGS[0] < longest_sequence(case) <= RUNGS[1] for case in second)


def test_a_slow_kernel_and_little_time_draw_none() -> None:
    """Two cases would take the whole budget of a kernel that Triton interprets."""
    long, kernel = sources(), a_kernel("dense_decode")
    assert long.due(kernel, seconds=0.0, cases=0, until=FAR) == []
    assert long.due(kernel, seconds=100.0, cases=100, until=FAR) == []
    assert long.due(kernel, seconds=10.0, cases=100, until=1.0) == []
    long.judged(kernel, RUNGS[0], 1.5, passed=True)
    assert long.due(kernel, seconds=10.0, cases=100, until=FAR) == []
    assert all(longest_sequence(case) <= RUNGS[0] for case in long.due(kernel, seconds=20.0, cases=100, until=FAR))


def test_what_has_no_long_sequences_has_no_long_cases() -> None:
    """A kernel for short ones would be accused of what it declares not to take."""
    for kernel in (a_kernel("dense_decode", max_seq_len=USUAL), a_kernel("merge_states")):
        assert sources().due(kernel, seconds=1.0, cases=100, until=FAR) == []


def test_a_bug_beyond_the_usual_lengths_is_found_and_counts_say_how_far_cases_went() -> None:
    """Nobody would know that a PASS says nothing of sequences longer than 300 tokens."""

    @dataclass
    class LongBench(Bench):
        def long_cases(self) -> LongCases:
            return sources()

    bench = LongBench(lambda case: WRONG if max(case.seq_lens) > USUAL else None, enough=after(Found), most_cases=3000)
    bench.run()
    (found,) = bench.of(Found)
    assert found.failure == WRONG
    counts = CaseCounts()
    for progress in bench.of(WorkerProgress):
        counts.add(progress)
    assert counts.largest["sequence"] == max(longest_sequence(case) for case in bench.judged) > USUAL
    assert counts.largest["tokens"] >= counts.largest["sequence"]
