"""Tensors that are strided all over: which tensors, and how unlike each other."""

from __future__ import annotations

from itertools import combinations

import pytest

from attnfuzz.problems.cases import PROBLEMS, Problem
from attnfuzz.problems.choices import lying_alike, stride_kinds_of, strided_tensors_of
from attnfuzz.problems.supports import Strides, Supports
from attnfuzz.strategies.storage import strides_everywhere

TURNS = range(3)


def supports_of(problem: Problem, strides: Strides) -> Supports:
    """All that a kernel can take."""
    if not str(problem).startswith("paged"):
        return Supports(strides=strides)
    return Supports(strides=strides, variants=("alibi", "sinks"), kv_dtypes=("float8_e4m3fn",))


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("strides", ["any", "last_contiguous"])
def test_each_two_tensors_differ_in_some_turn(problem: Problem, strides: Strides) -> None:
    """What takes the strides of K for V's would be right in all of them."""
    supports = supports_of(problem, strides)
    turns = [strides_everywhere(problem, supports, None, turn=turn) for turn in TURNS]
    of = {name: stride_kinds_of(strides, name) for name in strided_tensors_of(problem, supports)}
    alike = [(one, other) for one, other in combinations(of, 2) if of[one] == of[other] and len(of[one]) > 2]
    assert alike
    for one, other in alike:
        assert any(turn.get(one) != turn.get(other) for turn in turns), (one, other)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_nearly_all_are_strided_in_one_of_the_first_two_turns(problem: Problem) -> None:
    """Its stride would be ignored unseen for as long as it takes to compile a dozen formats."""
    supports = supports_of(problem, "any")
    first, second = (strides_everywhere(problem, supports, None, turn=turn) for turn in (0, 1))
    late = {*strided_tensors_of(problem, supports)} - {*first} - {*second}
    assert len(late) <= 1  # the fourth of those that can be strided in one way only
    assert not {"contiguous", "offset"} & {*first.values(), *second.values()}


@pytest.mark.parametrize("allowed", ["hybrid", "serving"])
@pytest.mark.parametrize("problem", ["dense_decode", "paged_decode", "split_decode", "paged_attention"])
def test_each_gap_of_an_engine_comes_alone_in_some_turn(problem: Problem, allowed: Strides) -> None:
    """What takes the strides of one tensor for another's would be right in all of them, or a gap never be met."""
    supports = Supports(strides=allowed)
    turns = [strides_everywhere(problem, supports, None, turn=turn) for turn in TURNS]
    gapped = [name for name in strided_tensors_of(problem, supports) if len(stride_kinds_of(allowed, name)) > 1]
    assert {name for turn in turns for name in turn} == set(gapped)
    for one, other in combinations(gapped, 2):
        alone = [turn for turn in turns if (one in turn) != (other in turn)]
        assert bool(alone) == (other not in lying_alike(allowed, one)), (one, other)


@pytest.mark.parametrize("turn", TURNS)
def test_a_kernel_for_contiguous_tensors_gets_no_others(turn: int) -> None:
    """Its refusal would be called a failure."""
    assert strides_everywhere("paged_decode", Supports(strides="contiguous"), "NHD", turn=turn) == {}
