"""Features of cases: the words that tell one bug's cases from another's, and what they say of a bug."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from attnfuzz.cases.features import features, general_features
from attnfuzz.identity.features import has_essentials, kernel_parts, most_specific, needs
from attnfuzz.problems.cases import Case, MergeStatesCase
from attnfuzz.problems.recipes import Needle, Pages, Values
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports
from tests.common.named_features import named, words


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"seq_len>1", "block_size>1", "num_seqs>1", "pages=shuffled", "spare blocks", "keys=normal"}, set()),
        ({"empty sequence", "ragged"}, {"empty sequence"}),
        ({"gqa_ratio>1", "gqa_ratio not pow2", "num_kv_heads>1"}, {"gqa_ratio not pow2"}),
        ({"gqa_ratio>1"}, {"gqa_ratio>1"}),
        ({"prefix empty", "one state empty"}, {"prefix empty"}),
        ({"both states empty", "prefix empty", "suffix empty", "one state empty"}, {"both states empty"}),
        ({"one state empty", "suffix empty", "lse equal/-inf", "some lse equal"}, {"lse equal/-inf"}),
        ({"one state empty", "layout=packed"}, {"one state empty", "layout=packed"}),
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


PAGED = simplest_case("paged_decode", Supports(), {})


def paged(**fields: Any) -> Case:
    return msgspec.structs.replace(PAGED, **fields)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (PAGED, set()),
        (paged(dtype="bfloat16"), {"dtype=bfloat16"}),
        (paged(head_size=72, scale=72**-0.5), {"head_size not pow2", "head_size>16", "head_size>64", "scale"}),
        (paged(num_q_heads=6, num_kv_heads=2), {"num_kv_heads>1", "gqa_ratio>1", "gqa_ratio not pow2"}),
        (paged(seq_lens=(3,), block_size=2), {"seq_len>1", "seq_len>block_size", "block_size>1", "partial last page"}),
        (paged(seq_lens=(0, 1)), {"num_seqs>1", "ragged", "empty sequence"}),
        (paged(block_size=24, seq_lens=(24,)), {"block_size>1", "block_size not pow2", "seq_len>1", "full last page"}),
        (paged(layout="packed"), {"layout=packed"}),
        (paged(v_head_size=13), {"v_head_size"}),
        (paged(v_head_size=40), {"v_head_size", "v_head_size>head_size"}),
        (paged(v_head_size=16), set()),
        (paged(pages=Pages(order="shuffled", spare_blocks=2, seed=9)), {"pages=shuffled", "spare blocks"}),
        (paged(pages=Pages(extra_columns=1, padding="garbage")), {"extra columns", "padding=garbage"}),
        (paged(pages=Pages(shared_blocks=1), seq_lens=(1, 1)), {"num_seqs>1", "shared pages"}),
        (paged(strides={"q": "padded_rows", "v_cache": "contiguous"}), {"strides:q=padded_rows"}),
        (paged(options={"tile": 32}), {"option tile=32"}),
        (paged(options={"num_splits": 4}), {"option num_splits=4", "num_splits>1", "empty split"}),
        (paged(values=Values(keys="normal", seed=5)), {"keys=normal"}),
        (paged(values=Values(values="large", logit_exponent=3)), {"values=large", "logit_exponent>0"}),
        (paged(values=Values(logit_exponent=-3)), {"logit_exponent<0"}),
        (paged(values=Values(needles=(Needle(seq=0, position=0, kv_head=0),))), {"needles"}),
    ],
)
def test_each_departure_from_the_simplest_case_is_named(case: Case, expected: set[str]) -> None:
    """Two different bugs would get the same signature, or one bug several."""
    assert words(features(case)) == expected


def test_sharing_pages_with_oneself_is_no_feature() -> None:
    """A single sequence would be described as sharing pages."""
    assert features(paged(pages=Pages(shared_blocks=3))) == frozenset()


def test_states_are_named_by_their_lse_pairs() -> None:
    """Failures with one and with two empty states would be taken for one bug."""
    case = MergeStatesCase(
        num_q_heads=2, num_tokens=3, head_size=16, lse_pairs=(("finite", "finite"), ("-inf", "+inf")), lse_layout="TH"
    )
    assert words(features(case)) == {"num_tokens>1", "num_q_heads>1", "lse_layout=TH", "lse -inf/+inf"}


def test_dense_rows_past_the_longest_sequence_are_named() -> None:
    """A kernel that reads past the longest sequence would get the signature of a plain failure."""
    case = msgspec.structs.replace(simplest_case("dense_decode", Supports(), {}), extra_rows=2)
    assert words(features(case)) == {"extra rows"}


def test_features_of_the_kernels_own_simplest_case_are_left_out() -> None:
    """Every finding of a bfloat16-only kernel would be called a bfloat16 bug."""
    supports = Supports(dtypes=("bfloat16",), head_sizes=(128,), block_sizes=(16,))
    options = {"tile": (64, 32)}
    case = simplest_case("paged_decode", supports, options)
    assert features(case, supports=supports, options=options) == frozenset()
    changed = msgspec.structs.replace(case, seq_lens=(17,), options={"tile": 32})
    assert words(features(changed, supports=supports, options=options)) == {
        "seq_len>1",
        "seq_len>block_size",
        "option tile=32",
    }


CACHES = {"strides:k_cache", "strides:v_cache", "cache strides"}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (paged(seq_lens=(2,), block_size=2), set()),
        (paged(strides={"q": "padded_rows", "out": "contiguous"}), {"strides:q"}),
        (paged(layout="HND"), {*CACHES, "layout"}),
        (paged(layout="packed"), {*CACHES, "K and V strides differ", "layout"}),
        (paged(layout="interleaved"), {*CACHES, "layout"}),
        (paged(seq_lens=(2,), strides={"k_cache": "padded_rows"}),
         {"strides:k_cache", "cache strides", "K and V strides differ"}),
        (paged(seq_lens=(2,), strides={"k_cache": "every_other", "v_cache": "every_other"}), CACHES),
        (paged(strides={"v_cache": "offset"}), {"strides:v_cache", "cache strides"}),
    ],
)  # fmt: skip
def test_what_wrong_addresses_have_in_common_is_named(case: Case, expected: set[str]) -> None:
    """A kernel that takes K's strides for V's would have as many bugs as there are ways to choose strides."""
    assert words(general_features(case)) == expected


def test_the_layout_that_a_kernel_always_has_is_no_general_feature() -> None:
    """Every finding of a kernel for the packed layout would be about strides."""
    supports = Supports(layouts=("packed",))
    case = simplest_case("paged_decode", supports, {})
    assert general_features(case, supports=supports) == frozenset()
    padded = msgspec.structs.replace(case, strides={"v_cache": "padded_rows"})
    assert words(general_features(padded, supports=supports)) == {"strides:v_cache", "cache strides"}


def test_states_to_merge_say_what_they_share_with_others() -> None:
    """NaN in the output of an empty state would be as many bugs as there are pairs of log-sum-exps."""
    case = MergeStatesCase(num_q_heads=1, head_size=16, num_tokens=2, lse_pairs=(("finite", "-inf"), ("+inf", "-inf")))
    expected = {
        "one state empty",
        "prefix empty",
        "suffix empty",
        "both states empty",
        "some lse -inf",
        "some lse +inf",
    }
    assert words(general_features(case)) == expected
