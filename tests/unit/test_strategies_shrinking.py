"""Hypothesis alone shrinks typical failures of whole cases to the simplest case that shows them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import find, settings

from attnfuzz.cases.features import features
from attnfuzz.problems.cases import Case, Problem
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies import cases
from tests.unit.named_features import words

OPTIONS = {"tile": (16, 32, 64)}


def shrunk(problem: Problem, fails: Callable[[Any], bool]) -> Case:
    return find(
        cases(problem, options=OPTIONS),
        fails,
        random=random.Random(4),
        settings=settings(database=None, max_examples=4000),
    )


@pytest.mark.parametrize("problem", ["dense_decode", "paged_decode", "split_decode", "merge_states"])
def test_a_failure_of_every_case_shrinks_to_the_simplest_case(problem: Problem) -> None:
    """Users of the strategies would be shown details that have nothing to do with the failure."""
    assert shrunk(problem, lambda _: True) == simplest_case(problem, Supports(), OPTIONS)


@pytest.mark.parametrize(
    ("problem", "fails", "expected"),
    [
        ("paged_decode", lambda case: case.layout == "HND", {"layout=HND"}),
        ("paged_decode", lambda case: 0 in case.seq_lens, {"empty sequence"}),
        ("paged_decode", lambda case: case.options["tile"] == 32, {"option tile=32"}),
        ("paged_decode", lambda case: case.strides.get("q") == "outer_gap", {"strides:q=outer_gap"}),
        (
            "paged_decode",
            lambda case: case.gqa_ratio % 2 and case.gqa_ratio > 1,
            {"gqa_ratio>1", "gqa_ratio not pow2"},
        ),
        (
            "paged_decode",
            lambda case: case.pages.order == "shuffled" and max(case.seq_lens) > case.block_size,
            {"pages=shuffled", "seq_len>1", "seq_len>block_size"},
        ),
        ("dense_decode", lambda case: max(case.seq_lens) > 64, {"seq_len>1"}),
        (
            "dense_decode",
            lambda case: case.dtype == "bfloat16" and case.head_size > 64,
            {"dtype=bfloat16", "head_size not pow2", "head_size>16", "head_size>64"},
        ),
        ("split_decode", lambda case: case.num_splits > 1, {"num_splits>1", "empty split"}),
        ("merge_states", lambda case: ("-inf", "-inf") in case.lse_pairs, {"lse -inf/-inf"}),
    ],
)
@pytest.mark.by_day("*-expected[39]")
def test_only_what_the_failure_needs_is_left(
    problem: Problem, fails: Callable[[Any], bool], expected: set[str]
) -> None:
    """Counterexamples would carry features that the failure does not need."""
    assert words(features(shrunk(problem, fails), options=OPTIONS)) == expected
