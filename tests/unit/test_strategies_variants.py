"""What is drawn beyond plain attention: only what a kernel declares, at every boundary, and plain cases as often."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis.strategies import SearchStrategy

from attnfuzz.cases.supported import why_unsupported
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.quantised_kv import KV_DTYPES, KV_GRANULARITIES
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import PLAIN_VARIANT, VARIANTS, Variant, VariantName, absent_tensors
from attnfuzz.strategies.decisions import decided
from attnfuzz.strategies.variants import QUANTISED_KV_BYTES, VARIANT_BYTES, decide_quantised_kv, decide_variant
from tests.unit.drawing import drawn_cases, drawn_from


def variants(*steps: int) -> SearchStrategy[Variant]:
    """Of all names, with windows about these pages and tiles."""
    return decided(lambda decisions: decide_variant(decisions, VARIANTS, steps), size=VARIANT_BYTES)


def test_a_kernel_that_declares_nothing_gets_plain_cases() -> None:
    """Every kernel written before would be blamed for a window that it knows nothing of."""
    drawn = drawn_cases("paged_decode", 100)
    assert {case.variant for case in drawn} == {PLAIN_VARIANT}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_kernel_gets_what_it_declares_and_nothing_else(name: VariantName) -> None:
    """A kernel with a window alone would be given sinks, or its window never be tried."""
    drawn = drawn_cases("paged_decode", 200, supports=Supports(variants=(name,)))
    assert {case.variant.names for case in drawn} == {(), (name,)}


def test_split_decode_has_no_sinks() -> None:
    """A partial state would be asked for a logit that belongs to the whole row."""
    drawn = drawn_cases("split_decode", 200, supports=Supports(variants=VARIANTS))
    names = {name for case in drawn for name in case.variant.names}
    assert names == {"window", "soft_cap", "alibi"}


def test_plain_cases_stay_common_and_combinations_occur() -> None:
    """Declaring a variant would cost the search for everything else, or bugs of two together stay unseen."""
    drawn: list[Variant] = drawn_from(variants())
    assert 0.25 < sum(variant == PLAIN_VARIANT for variant in drawn) / len(drawn) < 0.6
    assert any(len(variant.names) == 3 for variant in drawn)


def test_sinks_are_drawn_more_often_where_programs_share_a_row() -> None:
    """A sink that only the last of several programs must count would meet two splits that are used too seldom."""
    supports = Supports(variants=("sinks",))
    shares = [
        sum(case.variant.sinks is not None for case in drawn) / len(drawn)
        for choices in ((1,), (2, 5))
        for drawn in [drawn_cases("paged_decode", supports=supports, options={"num_splits": choices})]
    ]
    assert 0.1 < shares[0] < 0.27 < shares[1] < 0.45


def test_wide_groups_have_numbers_for_each_head_more_often() -> None:
    """Few groups leave rows of their last block without a head: what is read for such a row would show too seldom."""
    shares = [
        sum(case.variant.sinks is not None for case in drawn) / len(drawn)
        for ratio in (16, 17)
        for supports in [Supports(variants=("sinks",), gqa_ratios=(ratio,))]
        for drawn in [drawn_cases("paged_decode", supports=supports)]
    ]
    assert 0.1 < shares[0] < 0.27 < 0.4 < shares[1] < 0.6
    supports = Supports(variants=("alibi",), gqa_ratios=(17,))
    drawn = drawn_cases("paged_decode", 200, supports=supports)
    assert 0.4 < sum(case.variant.alibi is not None for case in drawn) / len(drawn) < 0.6


@pytest.mark.parametrize("name", ["sinks", "soft_cap"])
def test_low_scores_are_drawn_where_nothing_keeps_the_maximum_up(name: VariantName) -> None:
    """Nothing but the sink or the cap would count in a third of the cases with splits, whatever the kernel does."""
    supports = Supports(variants=(name,))
    drawn = drawn_cases("paged_decode", 800, supports=supports, options={"num_splits": (3,)})
    kept_up: list[bool] = []
    others: list[bool] = []
    for case in drawn:
        part = kept_up if case.variant.soft_cap or case.variant.has_weighty_sinks else others
        part.append(case.values.keys == "negative")
    assert 0.02 < sum(kept_up) / len(kept_up) < 0.22 < 0.3 < sum(others) / len(others) < 0.55


def test_windows_end_at_tiles_and_beside_them() -> None:
    """A window that is off by one at the end of a page would pass."""
    windows = {variant.window for variant in drawn_from(variants(16), draws=800)}
    assert windows >= {None, 1, 2, 15, 16, 17, 31, 32, 33, 4096}


def test_lengths_and_needles_lie_on_both_sides_of_a_window() -> None:
    """A key that is just outside of the window would leak unnoticed, or never be outside at all."""
    drawn = drawn_cases("paged_decode", 800, supports=Supports(variants=("window",)))
    outside, inside, around = set(), set(), set()
    for case in [case for case in drawn if isinstance(case, PagedDecodeCase) and case.variant.window]:
        window = case.variant.window or 0
        around |= {length - window for length in case.seq_lens}
        for needle in case.values.needles:
            first = case.seq_lens[needle.seq] - window
            outside |= {first - needle.position} if first > needle.position else set()
            inside |= {needle.position - first} if needle.position >= first > 0 else set()
    assert around >= {-1, 0, 1}
    assert 1 in outside
    assert 0 in inside


def test_no_strides_for_tensors_that_a_case_does_not_have() -> None:
    """A case would describe the memory of a tensor that is never built."""
    drawn = drawn_cases("paged_decode", 200, supports=Supports(strides="any", variants=VARIANTS))
    assert not any(set(case.strides) & absent_tensors(case.variant) for case in drawn)
    assert any("sinks" in case.strides or "alibi_slopes" in case.strides for case in drawn)


@pytest.mark.parametrize("problem", ["paged_decode", "dense_decode", "merge_states"])
def test_a_kernel_that_declares_nothing_gets_plain_caches(problem: Any) -> None:
    """Every kernel written before would be blamed for a cache that it cannot read."""
    supports = Supports() if problem == "paged_decode" else Supports(kv_dtypes=KV_DTYPES)
    drawn = drawn_cases(problem, 60, supports=supports)
    assert all(getattr(case, "kv", None) is None for case in drawn)


@pytest.mark.parametrize("problem", ["paged_decode", "split_decode", "paged_attention"])
def test_a_kernel_gets_what_it_declares(problem: Any) -> None:
    """A scale per head would never be tried, or be drawn for a kernel with one scale."""
    supports = Supports(strides="any", kv_dtypes=("float8_e5m2",), kv_scales=("tensor",))
    drawn = drawn_cases(problem, 200, supports=supports)
    found = {(case.kv.dtype, case.kv.per) for case in drawn if case.kv is not None}
    assert found == {("float8_e5m2", "tensor")}
    assert all(why_unsupported(supports, {}, case) is None for case in drawn)
    assert {name for case in drawn for name in case.strides} >= {"k_scale", "v_scale"}


def test_all_combinations_occur_beside_plain_caches() -> None:
    """Declaring a format would cost the search for everything else, or unequal scales stay untried."""
    drawn = drawn_from(
        decided(lambda one: decide_quantised_kv(one, KV_DTYPES, KV_GRANULARITIES), size=QUANTISED_KV_BYTES), draws=1000
    )
    assert 0.6 < sum(kv is None for kv in drawn) / len(drawn) < 0.9
    assert len({(kv.dtype, kv.per, kv.scales) for kv in drawn if kv is not None}) == 20


def test_scores_follow_the_scale_of_k() -> None:
    """Keys of few values tie, and times a scale of 8 errors of their scores would hide a doubled output."""
    supports = Supports(kv_dtypes=KV_DTYPES)
    drawn = [case for case in drawn_cases("paged_decode", supports=supports) if case.kv is not None]
    low = [case for case in drawn if case.values.keys == "negative"]
    reached = [
        80 * case.head_size * case.scale * max(case.kv.head_scales(case.num_kv_heads, case.values.seed).k)
        * 2.0**case.values.logit_exponent
        for case in low
    ]  # fmt: skip
    assert max(reached) < 2 * 8e3
    assert sum(score >= 8e3 for score in reached) > len(low) // 3


def test_numbers_are_as_large_as_their_scales_are_small() -> None:
    """Scores of a cache with a scale near 2^-9 would all be 0, and a wrong scale change nothing."""
    supports = Supports(kv_dtypes=KV_DTYPES, kv_scales=("tensor",))
    drawn = drawn_cases("paged_decode", 3000, supports=supports)
    found = []
    for case in drawn:
        if case.kv is not None and case.kv.scales == "wide" and case.values.keys == "normal":
            scale = max(case.kv.head_scales(case.num_kv_heads, case.values.seed).k)
            found.append((scale, scale * 2.0**case.values.logit_exponent))
    assert min(scale for scale, _ in found) < 2**-8
    assert max(scale for scale, _ in found) > 2**6
    assert sum(2**-5 <= size <= 2**9 for _, size in found) > 0.9 * len(found)


def test_packed_caches_have_heads_of_whole_pieces() -> None:
    """A case would be drawn that cannot be built."""
    supports = Supports(kv_dtypes=KV_DTYPES, layouts=("packed",), head_sizes=(40, 64))
    drawn = drawn_cases("paged_decode", 200, supports=supports)
    assert {case.head_size for case in drawn if case.kv is not None} == {64}
    assert {case.head_size for case in drawn} == {40, 64}
