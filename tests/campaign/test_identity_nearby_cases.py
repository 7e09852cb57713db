"""attnfuzz.identity.nearby_cases: cases that differ from a failing one in what a bug may be about."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from attnfuzz.cases.facets.facet import changed
from attnfuzz.cases.facets.heads import RATIO_NOT_POW2
from attnfuzz.cases.facets.storage import DEAD_ROWS
from attnfuzz.declaration import Declaration
from attnfuzz.identity.features import case_features, kernel_parts
from attnfuzz.identity.nearby_cases import alternatives, crossed, strides_swapped, without
from attnfuzz.problems.cases import Case, DenseDecodeCase, MaskedAttentionCase, PagedDecodeCase
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.fields import Choice, Field, Integer
from attnfuzz.problems.masks import Mask
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports
from tests.common.named_features import named, words

KERNEL = Declaration(name="k", problem="paged_decode", target="k", supports=Supports(v_head_sizes="any", strides="any"))
BASE = msgspec.structs.replace(
    simplest_case("paged_decode", KERNEL.supports, {}), seq_lens=(5, 0), block_size=4, num_q_heads=6, num_kv_heads=2
)


def paged(**fields: Any) -> Case:
    return msgspec.structs.replace(BASE, **fields)


@pytest.mark.parametrize(
    ("aspect", "case", "ways"),
    [
        ("K and V strides differ", paged(strides={"k_cache": "padded_rows", "q": "every_other"}), 1),
        ("K and V strides differ", paged(strides={"k_cache": "padded_rows", "v_cache": "every_other"}), 2),
        ("K and V strides differ", paged(layout="packed"), 1),
        ("cache strides", paged(layout="HND", strides={"v_cache": "padded_rows"}), 1),
        ("strides:q", paged(strides={"q": "padded_rows"}), 1),
        ("empty sequence", paged(), 1),
        ("gqa_ratio not pow2", paged(), 1),
        ("v_head_size", paged(v_head_size=13), 1),
        ("K and V strides differ", paged(v_head_size=40, strides={"k_cache": "padded_rows"}), 2),
    ],
)
def test_a_sibling_lacks_the_aspect_and_keeps_the_others(aspect: str, case: Case, ways: int) -> None:
    """If more is taken away, a second bug goes with it and is closed as the first."""
    before = words(kernel_parts(case_features(KERNEL, case)))
    assert aspect in before or aspect == "cache strides"
    (taken,) = named(aspect)
    siblings = without(taken, KERNEL, case)
    assert len(siblings) == ways
    for sibling in siblings:
        after = words(kernel_parts(case_features(KERNEL, sibling)))
        assert aspect not in after
        other = {one for one in before if "trides" not in one} - {aspect, "layout=HND"}
        assert other <= after | {"gqa_ratio>1", *(["v_head_size"] if aspect == "K and V strides differ" else [])}


def test_aspects_that_cannot_be_taken_away_alone_have_no_siblings() -> None:
    """A data type has no neighbour that leaves the numbers as they are."""
    assert without(Feature("dtype", "=bfloat16"), KERNEL, paged(dtype="bfloat16")) == []


def test_siblings_stay_within_what_the_kernel_supports() -> None:
    """A kernel would be blamed for what it never promised."""
    only_odd = msgspec.structs.replace(KERNEL, supports=Supports(gqa_ratios=(3,)))
    assert without(RATIO_NOT_POW2, only_odd, paged()) == []
    interleaved = paged(layout="interleaved", strides={"k_cache": "padded_rows"})
    assert not strides_swapped(KERNEL, interleaved)


def test_swapped_strides_change_places() -> None:
    """What tells a bug of K's strides from one of both is whether it moves with them."""
    (swapped,) = strides_swapped(KERNEL, paged(strides={"k_cache": "padded_rows"}))
    assert swapped is not None
    assert swapped.strides == {"v_cache": "padded_rows"}
    assert not strides_swapped(KERNEL, paged())


def _pages(case: Case) -> int:
    assert isinstance(case, PagedDecodeCase)
    return case.block_size


def _length(case: Case) -> int:
    assert isinstance(case, PagedDecodeCase)
    return case.seq_lens[0]


@pytest.mark.parametrize(
    ("length", "size", "others"),
    [(5, 4, {1, 5, 7}), (1, 1, {2}), (16, 16, {1, 17})],
)
def test_tokens_lie_on_pages_of_other_sizes_too(length: int, size: int, others: set[int]) -> None:
    """A token that is lost wherever it lies would be a finding for each page that it can lie on."""
    case = paged(seq_lens=(length,), block_size=size)
    of_one_length = [other for other in alternatives(KERNEL, case) if _length(other) == length]
    assert {_pages(other) for other in of_one_length} == others


def test_rows_that_hold_no_token_come_about_in_both_ways() -> None:
    """A mask that lets in the first would be one finding with rows of nobody, and one with a longer neighbour."""
    kernel = Declaration(name="k", problem="dense_decode", target="k", supports=Supports())
    base = simplest_case("dense_decode", kernel.supports, {})
    assert isinstance(base, DenseDecodeCase)
    ways = [
        msgspec.structs.replace(base, seq_lens=(2,), extra_rows=3),
        msgspec.structs.replace(base, seq_lens=(2, 5)),
    ]
    for one, other in (ways, ways[::-1]):
        assert list(alternatives(kernel, one)) == [other]
        shared = case_features(kernel, one) & case_features(kernel, other)
        assert DEAD_ROWS in shared
        assert not shared & {"extra rows", "ragged", "num_seqs>1"}


def lengths_of(case: Case) -> tuple[int, ...]:
    assert isinstance(case, PagedDecodeCase)
    return case.seq_lens


def test_lengths_that_differ_need_none_that_is_0() -> None:
    """A kernel that takes the first length for all would have two findings, the second with an empty sequence."""
    case = paged(seq_lens=(2, 0, 1))
    found = [
        other for other in alternatives(KERNEL, case) if "empty sequence" not in words(case_features(KERNEL, other))
    ]
    assert [lengths_of(other) for other in found] == [(3, 1, 2)]
    assert {"ragged", "num_seqs>1"} <= words(case_features(KERNEL, found[0]))
    assert not any(0 in lengths_of(other) for other in alternatives(KERNEL, paged(seq_lens=(2, 1))))


@pytest.mark.parametrize(
    ("case", "others"),
    [
        (paged(), 0),
        (paged(dtype="bfloat16"), 1),
        (paged(layout="HND"), 2),
        (paged(strides={"q": "padded_rows"}), 4),
    ],
)
def test_alternatives_have_another_value_of_what_is_not_the_simplest(case: Case, others: int) -> None:
    """A bug of bfloat16 and float32 would be two findings, and one of each other layout three."""
    alike = [other for other in alternatives(KERNEL, case) if lengths_of(other) == lengths_of(case)]
    found = [other for other in alike if _pages(other) == _pages(case)]
    assert len(found) == others
    for other in found:
        shared = case_features(KERNEL, other) & case_features(KERNEL, case)
        assert case_features(KERNEL, case) - shared
        assert shared >= case_features(KERNEL, BASE)


@pytest.mark.parametrize("kind", ["bits", "pages", "tree"])
def test_a_mask_may_be_of_any_kind(kind: Any) -> None:
    """A kernel that reads its mask wrongly had a finding for masks of pages and one for masks of bits."""
    kernel = Declaration(name="k", problem="masked_attention", target="k")
    base = simplest_case("masked_attention", kernel.supports, {})
    assert isinstance(base, MaskedAttentionCase)
    case = msgspec.structs.replace(base, query_lens=(2,), seq_lens=(3,), mask=Mask(kind=kind, seqs=((0, 0),)))
    masks = [other.mask for other in alternatives(kernel, case) if isinstance(other, MaskedAttentionCase)]
    assert {mask.kind for mask in masks} - {kind} == {"bits", "pages", "tree"} - {kind}
    same = msgspec.structs.replace(case, mask=next((mask for mask in masks if mask.kind == "bits"), case.mask))
    assert same.rows_seen == case.rows_seen
    shared = case_features(kernel, same) & case_features(kernel, case)
    assert "mask" in words(shared)


def test_a_users_field_may_be_called_strides() -> None:
    """A search would end in an internal error at the second bug of a kernel whose problem has such a field."""
    fields: dict[str, Field] = {"length": Integer(1, 8), "strides": Choice(("contiguous", "outer_gap"))}
    kernel = Declaration(name="k", problem=OpenProblem(place="k.py:P", fields=fields), target="k", supports=Supports())
    simplest = simplest_case(kernel.problem, kernel.supports, {})
    long, gapped = changed(simplest, length=5), changed(simplest, strides="outer_gap")
    assert long is not None
    assert gapped is not None
    assert crossed(kernel, long, gapped) == [changed(long, strides="outer_gap")]
