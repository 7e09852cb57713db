"""attnfuzz.campaign.draw.larger_cases: on a CPU too a kernel meets large cases, as far as it is fast enough."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from attnfuzz.campaign.draw.larger_cases import RUNGS, LargerCases, asked_sizes, longest_sequence, roomy_sizes
from attnfuzz.campaign.draw.sampling import CaseSource
from attnfuzz.campaign.messages import Found
from attnfuzz.campaign.statistics import CaseCounts, WorkerProgress
from attnfuzz.campaign.worker import _strategy
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import PROBLEMS, BundledProblem, Case
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies.sizes import CPU_SIZES, GPU_SIZES, Sizes
from tests.common.drawing import drawn_cases
from tests.common.search_bench import WRONG, Bench, after

USUAL = CPU_SIZES.max_seq_len
FAR = 1e9


def source_of(sizes: Sizes) -> CaseSource:
    return CaseSource(partial(_strategy, sizes), seeds=(1, sizes.max_seq_len))


def larger(**changes: Any) -> LargerCases:
    """In time that stands still."""
    return LargerCases(source_of, **{"clock": lambda: 0.0, **changes})


def a_kernel(problem: BundledProblem, *, lengths: tuple[int, ...] = (), **limits: Any) -> Declaration:
    return Declaration(name="k", problem=problem, target="k.py:k", supports=Supports(**limits), lengths=lengths)


def after_usual(kernel: Declaration, case_s: float, **changes: Any) -> LargerCases:
    """A hundred usual cases have been judged, of so many seconds each."""
    found = larger(**changes)
    found.round_over(kernel, roomy=False, cases=100, seconds=100 * case_s)
    return found


@pytest.mark.parametrize("problem", [one for one in PROBLEMS if one != "merge_states"])
@pytest.mark.by_day("dense_decode", "paged_decode")
def test_a_fast_kernel_climbs(problem: BundledProblem) -> None:
    """Zeros from 300 or 2,000 tokens on would pass."""
    kernel = a_kernel(problem, head_sizes=(16,))
    long = after_usual(kernel, 0.01)
    first = long.due(kernel, until=FAR)
    assert first
    assert all(USUAL < longest_sequence(case) <= RUNGS[0] for case in first)
    for _ in first:
        long.judged(kernel, RUNGS[0], 0.04, passed=True)
    long.round_over(kernel, roomy=False, cases=100, seconds=100.0)
    second = long.due(kernel, until=FAR)
    assert second
    assert all(RUNGS[0] < longest_sequence(case) <= RUNGS[1] for case in second)


def test_a_slow_kernel_and_little_time_draw_none() -> None:
    """Two cases would take the whole budget of a kernel that Triton interprets."""
    kernel = a_kernel("dense_decode")
    assert larger().due(kernel, until=FAR) == []
    assert larger().roomy(kernel) is None
    assert after_usual(kernel, 1.0).due(kernel, until=FAR) == []
    assert after_usual(kernel, 1.0).roomy(kernel) is None
    long = after_usual(kernel, 0.1)
    assert long.due(kernel, until=1.0) == []
    long.judged(kernel, RUNGS[0], 1.5, passed=True)
    assert long.due(kernel, until=FAR) == []
    long.round_over(kernel, roomy=False, cases=100, seconds=10.0)
    assert all(longest_sequence(case) <= RUNGS[0] for case in long.due(kernel, until=FAR))


def test_the_less_larger_cases_cost_the_more_of_them_there_are() -> None:
    """A kernel in plain torch would be tried with cases as small as those of one that Triton interprets."""
    kernel = a_kernel("paged_decode")
    shares = []
    for roomy_s in (0.05, 0.2):
        sizes, spent = after_usual(kernel, 0.05), 0.0
        for _ in range(200):
            is_roomy = sizes.roomy(kernel) is not None
            spent += is_roomy
            sizes.round_over(kernel, roomy=is_roomy, cases=round(1 / roomy_s) if is_roomy else 20, seconds=1.0)
        shares.append(spent / 200)
    assert 0.25 < shares[0] < 0.35
    assert 0.05 < shares[1] < 0.15


def test_a_round_has_as_many_long_cases_as_fill_their_share() -> None:
    """Of long rounds few would be spent on lengths that usual cases do not have, however fast a kernel is."""
    kernel = a_kernel("paged_decode", head_sizes=(16,))
    at_once = []
    for case_s in (0.02, 1.0):
        long = after_usual(kernel, 0.02)
        long.judged(kernel, USUAL, case_s, passed=True)
        long.round_over(kernel, roomy=False, cases=1000, seconds=20.0)
        at_once.append(len(long.due(kernel, until=FAR)))
    assert at_once == [16, 2]


def test_roomy_cases_have_more_tokens_in_all() -> None:
    """What is wrong from 128 tokens on was drawn once in hundred cases."""
    usual, roomy = (drawn_cases("paged_attention", 600, sizes=one) for one in (CPU_SIZES, roomy_sizes(CPU_SIZES)))
    long = [sum(longest_sequence(case) >= 128 for case in cases) / 600 for cases in (usual, roomy)]
    assert long[1] > 2 * long[0]
    assert long[1] > 0.15


def test_limits_in_the_source_are_met_from_both_sides() -> None:
    """A kernel that does something else from 700 tokens on would be tried with 300 and 1,200."""
    kernel = a_kernel("paged_decode", lengths=(700,), head_sizes=(16,))
    long, met = after_usual(kernel, 0.001), set[int]()
    for _ in range(60):
        for case in long.due(kernel, until=FAR):
            met.update(getattr(case, "seq_lens", ()))
            long.judged(kernel, longest_sequence(case), 0.001, passed=True)
        long.round_over(kernel, roomy=False, cases=100, seconds=0.1)
        if met >= {699, 700, 701} and max(met) > RUNGS[0]:
            break
    else:
        pytest.fail(f"{sorted(met)} leave something out")
    far = a_kernel("paged_decode", lengths=(9000,), head_sizes=(16,))
    long = after_usual(far, 0.001)
    for tokens in RUNGS:
        assert long.due(far, until=FAR)
        long.judged(far, tokens, 0.01, passed=True)
    long.round_over(far, roomy=False, cases=100, seconds=100.0)
    assert all(RUNGS[1] < longest_sequence(case) for case in long.due(far, until=FAR))


def test_what_has_no_long_sequences_has_no_long_cases() -> None:
    """A kernel for short ones would be accused of what it declares not to take."""
    for kernel in (a_kernel("dense_decode", max_seq_len=USUAL), a_kernel("merge_states")):
        assert after_usual(kernel, 0.01).due(kernel, until=FAR) == []


def test_a_user_says_how_long_sequences_are_and_how_many() -> None:
    """Who knows the lengths that are served could not have them tried on a CPU, or others left out."""
    kernel = a_kernel("paged_decode", head_sizes=(16,))
    short = asked_sizes(CPU_SIZES, max_seq_len=40, max_seqs=20)
    cases: list[Case] = drawn_cases("paged_decode", sizes=short)
    assert max(map(longest_sequence, cases)) == 40
    assert max(len(getattr(case, "seq_lens", ())) for case in cases) > 2 * CPU_SIZES.max_seqs
    assert after_usual(kernel, 0.01, usual=short, max_seq_len=40).due(kernel, until=FAR) == []
    asked = after_usual(kernel, 0.1, max_seq_len=7000)
    for tokens in RUNGS:
        asked.judged(kernel, tokens, 0.9, passed=True)
    asked.round_over(kernel, roomy=False, cases=1000, seconds=1000.0)
    found = asked.due(kernel, until=FAR)
    assert found
    assert all(RUNGS[0] < longest_sequence(case) <= 7000 for case in found)
    on_gpu = {"usual": GPU_SIZES, "on_gpu": True}
    assert after_usual(kernel, 0.001, **on_gpu).due(kernel, until=FAR) == []
    found = after_usual(kernel, 0.001, max_seq_len=20_000, **on_gpu).due(kernel, until=FAR)
    assert found
    assert max(map(longest_sequence, found)) == 20_000


def test_a_bug_beyond_the_usual_lengths_is_found_and_counts_say_how_far_cases_went() -> None:
    """Nobody would know that a PASS says nothing of sequences longer than 300 tokens."""

    @dataclass
    class LongBench(Bench):
        def larger(self) -> LargerCases:
            return larger()

    bench = LongBench(lambda case: WRONG if max(case.seq_lens) > USUAL else None, enough=after(Found), most_cases=3000)
    bench.run()
    (found,) = bench.of(Found)
    assert found.failure == WRONG
    counts = CaseCounts()
    for progress in bench.of(WorkerProgress):
        counts.add(progress)
    assert counts.largest["sequence"] == max(longest_sequence(case) for case in bench.judged) > USUAL
    assert counts.largest["tokens"] >= counts.largest["sequence"]
