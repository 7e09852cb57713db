"""Looking for a smaller value of one field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from attnfuzz.problems.cases import MergeStatesCase
from attnfuzz.problems.fields import Proposal, first_of, lower_integer

CASE = MergeStatesCase(num_q_heads=1, num_tokens=100, head_size=16)


def tokens(case: MergeStatesCase, count: int) -> MergeStatesCase:
    return msgspec.structs.replace(case, num_tokens=count)


def answer(proposal: Proposal[Any], fails: Callable[[Any], bool]) -> tuple[Any, list[int]]:
    """What the proposal returns, and the numbers of tokens that it tried."""
    tried: list[int] = []
    try:
        candidate = next(proposal)
        while True:
            if candidate is not None:
                tried.append(candidate.num_tokens)
            candidate = proposal.send(candidate is not None and fails(candidate))
    except StopIteration as done:
        return done.value, tried


@pytest.mark.parametrize("least", [1, 2, 3, 33, 64, 99, 100])
def test_bisection_finds_the_least_failing_value(least: int) -> None:
    """A length or count would stay larger than the failure needs."""
    found, tried = answer(lower_integer(CASE, 100, 1, tokens), lambda case: case.num_tokens >= least)
    assert found.num_tokens == least
    assert len(tried) <= 9
    assert len(tried) == len(set(tried))


def test_likely_values_are_tried_before_bisection() -> None:
    """A failure at multiples of 16 would be found at 96 instead of 16."""
    found, _ = answer(
        lower_integer(CASE, 96, 1, tokens, likely=[15, 16, 17, 400]), lambda case: case.num_tokens % 16 == 0
    )
    assert found.num_tokens == 16


def test_nothing_below_the_lower_limit_is_tried() -> None:
    """A kernel that takes no empty sequences would be given one."""
    _, tried = answer(lower_integer(CASE, 100, 2, tokens, likely=[0, 1]), lambda _: False)
    assert min(tried) == 2


def test_the_first_accepted_candidate_is_taken() -> None:
    """Simplest first would mean nothing, and runs would be wasted."""
    candidates = [None, tokens(CASE, 1), tokens(CASE, 2), tokens(CASE, 3)]
    found, tried = answer(first_of(CASE, candidates), lambda case: case.num_tokens >= 2)
    assert (found.num_tokens, tried) == (2, [1, 2])


def test_without_an_accepted_candidate_the_case_stays() -> None:
    """A case that no longer fails would be reported."""
    found, _ = answer(first_of(CASE, [None, tokens(CASE, 1)]), lambda _: False)
    assert found is CASE
