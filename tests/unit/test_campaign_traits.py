"""Traits: what can be said of a case in a word."""

from __future__ import annotations

import msgspec

from attnfuzz.cases.features import features, traits
from attnfuzz.problems.cases import DenseDecodeCase, MergeStatesCase, PagedDecodeCase
from tests.unit.named_features import words

CASE = PagedDecodeCase(
    num_q_heads=6, head_size=80, num_kv_heads=2, seq_lens=(17, 4), scale=0.125, block_size=16, options={"tile": 32}
)


def test_sizes_lengths_and_recipes_have_their_traits() -> None:
    """What no trait can say cannot be learned, and each such crash costs a process."""
    expected = {
        "head_size is 80",
        "head_size is a multiple of 16",
        "gqa_ratio is 3",
        "gqa_ratio is not a multiple of 2",
        "some length is not a multiple of 2",
        "longest length ends one past a step of 16",
        "every length is no longer than 32",
        "option tile is 32",
        "layout is NHD",
        "strides:k_cache is contiguous",
        "keys is equal",
    }
    assert expected <= words(traits(CASE))
    assert "every length is a multiple of 2" not in words(traits(CASE))


def test_features_are_traits() -> None:
    """What a finding is known to need would not be recognised in a condition."""
    assert features(CASE)
    assert features(CASE) <= traits(CASE)


def test_cases_that_differ_in_seeds_have_the_same_traits() -> None:
    """Seeds are different in each case: a condition on them would hold for no other."""
    other = msgspec.structs.replace(CASE, values=msgspec.structs.replace(CASE.values, seed=7))
    assert traits(other) == traits(CASE)


def test_every_problem_has_traits() -> None:
    """A kernel of a problem without traits would have all of its cases taken for one."""
    dense = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(0,), scale=0.25, extra_rows=2)
    merge = MergeStatesCase(num_q_heads=1, head_size=16, num_tokens=3, lse_pairs=(("finite", "-inf"),))
    assert {"extra_rows is 2", "some length is 0"} <= words(traits(dense))
    assert {"num_tokens is 3", "some suffix LSE -inf"} <= words(traits(merge))
