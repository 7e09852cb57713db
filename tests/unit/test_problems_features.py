"""The words that tell one bug's cases from another's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from attnfuzz.cases.features import features, general_features
from attnfuzz.problems.cases import Case, MergeStatesCase
from attnfuzz.problems.recipes import Needle, Pages, Values
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports
from tests.unit.named_features import words

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
