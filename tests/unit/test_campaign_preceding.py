"""attnfuzz.campaign.triage.confirmation: of the cases that ran before a failing one, those that it needs are kept."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import pytest

from attnfuzz.campaign.triage.confirmation import fewer, find_preceding, simpler
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.problems.simplest import simplest_case
from tests.unit.pretended_process import CRASH, KERNEL, WRONG, PretendedProcess, a_case

CASES = tuple(a_case(length) for length in range(1, 65))
SIMPLEST = simplest_case("dense_decode", KERNEL.supports, KERNEL.options)


@pytest.mark.parametrize("needed", [(63,), (0,), (20,), (5, 40), (0, 1, 62)])
def test_only_what_is_needed_is_kept(needed: tuple[int, ...]) -> None:
    """Sixty cases in a file hide the two that matter."""
    wanted = [CASES[i] for i in needed]
    assert fewer(CASES, lambda kept: all(case in kept for case in wanted), until=math.inf) == tuple(wanted)


def test_the_last_few_are_tried_first() -> None:
    """A sequence takes as long to run as it is, and most bugs need what ran just before."""
    tried: list[int] = []

    def fails(kept: Sequence[Case]) -> bool:
        tried.append(len(kept))
        return CASES[-3] in kept

    fewer(CASES, fails, until=math.inf)
    assert tried[:3] == [1, 2, 4]
    assert max(tried) == 4


def test_nothing_is_tried_when_time_is_up() -> None:
    """What is known to fail is kept as it is."""
    assert fewer(CASES, lambda kept: pytest.fail("tried"), until=time.monotonic()) == CASES


def test_an_earlier_case_that_fails_alike_ends_the_sequence() -> None:
    """The shorter sequence says more about the bug."""
    process = PretendedProcess(lambda case, earlier: CRASH if CASES[2] in earlier else None)
    found = find_preceding(process.suspect(a_case(99), *CASES), [CASES], process.trials())
    assert found is not None
    assert (found.case, found.preceding) == (CASES[3], CASES[:3])


def test_a_case_that_fails_alone_needs_no_others() -> None:
    """It would be saved with cases that have nothing to do with it, as its own predecessors."""
    process = PretendedProcess(lambda case, earlier: CRASH)
    assert find_preceding(process.suspect(a_case(99), *CASES), [CASES], process.trials()) is None


def test_another_crash_on_the_way_is_not_taken_for_it() -> None:
    """The process that the failing case ran in had survived."""
    process = PretendedProcess(lambda case, earlier: CRASH if case == CASES[1] and earlier else None)
    suspect = process.suspect(a_case(99), *CASES, failure=WRONG)
    assert find_preceding(suspect, [CASES], process.trials()) is None


def test_preceding_cases_become_as_simple_as_they_can_be() -> None:
    """Any case will do for some bugs; for others, one thing about it matters."""
    suspect = PretendedProcess(lambda case, earlier: None).suspect(a_case(7), CASES[9], CASES[8])
    assert simpler(suspect, lambda cases: len(cases) == 2, until=math.inf) == (SIMPLEST, SIMPLEST)

    def fails(cases: Sequence[Case]) -> bool:
        assert isinstance(cases[0], DenseDecodeCase)
        return cases[0].seq_lens[0] >= 8

    assert simpler(suspect, fails, until=math.inf) == (a_case(8), SIMPLEST)
