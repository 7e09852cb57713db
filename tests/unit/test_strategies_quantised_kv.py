"""What is drawn of 8-bit caches: only what a kernel declares, and plain caches more often."""

from __future__ import annotations

from typing import Any

import pytest

from attnfuzz.cases.supported import why_unsupported
from attnfuzz.problems.quantised_kv import KV_DTYPES, KV_GRANULARITIES
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies.decisions import decided
from attnfuzz.strategies.quantised_kv import QUANTISED_KV_BYTES, decide_quantised_kv
from tests.unit.drawing import drawn_cases, drawn_from


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
