"""attnfuzz.identity.features: what a bug is about, and what a person needs to read of it."""

from __future__ import annotations

import pytest

from attnfuzz.identity.features import has_essentials, kernel_parts, most_specific, needs
from tests.unit.named_features import named


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"seq_len>1", "block_size>1", "num_seqs>1", "pages=shuffled", "spare blocks", "keys=normal"}, set()),
        ({"empty sequence", "ragged"}, {"empty sequence"}),
        ({"gqa_ratio>1", "gqa_ratio not pow2", "num_kv_heads>1"}, {"gqa_ratio not pow2"}),
        ({"gqa_ratio>1"}, {"gqa_ratio>1"}),
        ({"dtype=bfloat16", "option tile=32"}, {"dtype=bfloat16", "option tile=32"}),
        ({"strides:q=padded_rows", "strides:q"}, {"strides:q"}),
        ({"strides:k", "strides:k=padded_rows", "cache strides"}, {"strides:k", "cache strides"}),
        ({"strides:k", "strides:k=padded_rows", "cache strides", "K and V strides differ"}, {"K and V strides differ"}),
        ({"strides:k_cache", "strides:v_cache", "layout=packed", "K and V strides differ"}, {"K and V strides differ"}),
    ],
)
def test_sizes_say_nothing_of_what_a_bug_is_about(features: set[str], expected: set[str]) -> None:
    """Bugs would be merged because both need two tokens, or kept apart because one needs three."""
    assert kernel_parts(named(*features)) == named(*expected)


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"seq_len>1", "block_size>1", "full last page"}, {"full last page"}),
        ({"strides:q", "strides:q=padded_rows", "seq_len>1"}, {"strides:q=padded_rows", "seq_len>1"}),
        ({"strides:k_cache", "strides:v_cache", "layout=HND", "cache strides"}, {"layout=HND"}),
        ({"cache strides"}, {"cache strides"}),
        ({"cache strides", "strides:k_cache"}, {"strides:k_cache"}),
        ({"cache strides", "K and V strides differ"}, {"K and V strides differ"}),
        ({"cache strides", "K and V strides differ", "strides:v", "strides:v=padded_rows"},
         {"K and V strides differ", "strides:v=padded_rows"}),
    ],
)  # fmt: skip
def test_a_general_feature_is_not_shown_beside_what_implies_it(features: set[str], expected: set[str]) -> None:
    """A signature that says one thing three times is not read."""
    assert most_specific(named(*features)) == named(*expected)


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"seq_len>1", "seq_len>block_size", "pages=shuffled", "spare blocks"}, {"seq_len>block_size"}),
        ({"seq_len>1", "keys=normal", "values=integers", "needles"}, {"seq_len>1"}),
        ({"logit_exponent>0", "seq_len>1"}, {"logit_exponent>0", "seq_len>1"}),
        ({"block_size>1", "partial last page"}, {"block_size>1"}),
        ({"block_size>1", "seq_len>1"}, {"block_size>1"}),
        ({"block_size>1", "partial last page", "seq_len>1"}, {"block_size>1", "partial last page", "seq_len>1"}),
        ({"pages=reversed", "shared pages"}, {"pages moved"}),
        ({"keys=normal"}, set()),
    ],
)
def test_a_bug_does_not_need_what_makes_it_visible(features: set[str], expected: set[str]) -> None:
    """A wrong page would be one bug where it holds a token and another where it holds none."""
    assert needs(named(*features)) == named(*expected)


@pytest.mark.parametrize(
    ("less", "more", "part"),
    [
        ({"block_size>1"}, {"block_size>1", "num_seqs>1"}, True),
        ({"pages=shuffled"}, {"pages=reversed", "seq_len>1"}, True),
        ({"pages=shuffled"}, {"seq_len>1"}, False),
        ({"seq_len>1"}, {"block_size>1", "partial last page"}, False),
        (set(), {"seq_len>1"}, False),
        ({"some lse far apart"}, {"one state empty", "prefix empty"}, True),
        ({"one state empty"}, {"both states empty", "prefix empty", "suffix empty"}, True),
        ({"both states empty"}, {"one state empty"}, False),
    ],
)
def test_what_any_case_shows_is_part_of_nothing(less: set[str], more: set[str], part: bool) -> None:
    """A bug that every case shows would take in all others."""
    assert has_essentials(named(*more), named(*less)) is part
