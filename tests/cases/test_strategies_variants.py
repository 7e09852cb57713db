"""Variants, query tokens and masked tiles as they are drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis.strategies import SearchStrategy

from attnfuzz.cases.facets import Domain, facets_of
from attnfuzz.cases.supported import why_unsupported
from attnfuzz.problems.cases import PagedAttentionCase, PagedDecodeCase, Problem
from attnfuzz.problems.quantised_kv import KV_DTYPES, KV_GRANULARITIES
from attnfuzz.problems.supports import OptionValue, Supports
from attnfuzz.problems.variants import PLAIN_VARIANT, VARIANTS, Variant, VariantName, absent_tensors
from attnfuzz.strategies import CPU_SIZES, GPU_SIZES, Sizes
from attnfuzz.strategies.decisions import decided
from attnfuzz.strategies.variants import QUANTISED_KV_BYTES, VARIANT_BYTES, decide_quantised_kv, decide_variant
from tests.common.drawing import drawn_cases, drawn_from
from tests.quality.drawn import TILES, of_case


def variants(*steps: int) -> SearchStrategy[Variant]:
    """Of all names, with windows about these pages and tiles."""
    return decided(lambda decisions: decide_variant(decisions, VARIANTS, steps), size=VARIANT_BYTES)


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


@cache
def drawn(count: int, supports: Supports | None = None, sizes: Sizes = CPU_SIZES) -> list[PagedAttentionCase]:
    return drawn_cases("paged_attention", count, supports=supports, sizes=sizes)


def test_every_level_of_queries_is_drawn_for_the_interpreter_too() -> None:
    """A tile boundary that only a GPU meets would be missed where most kernels are written."""
    levels: Counter[tuple[str, str]] = Counter()
    facets, domain = facets_of(PagedAttentionCase), Domain("paged_attention", Supports(), {})
    of_rows = [axis for facet in facets for axis in facet.row_axes(domain)]
    of_cases = [axis for facet in facets for axis in facet.axes(domain)]
    row_wise = [axis for axis in of_rows if axis.name in ("query length", "phase", "causal needle")]
    whole = [axis for axis in of_cases if axis.name in ("batch", "bounds", "padding tokens")]
    for case in drawn(1500):
        levels.update({(axis.name, level) for axis in whole for level in axis.of(case)})
        rows = [row for facet in facets for row in facet.rows(case)]
        levels.update({(axis.name, level) for row in rows for axis in row_wise for level in axis.of(row)})
    wanted = {(axis.name, level) for axis in (*row_wise, *whole) for level in axis.levels}
    assert {level for level in wanted if levels[level] < 5} == set()


def test_what_is_not_causal_is_drawn_for_who_declares_it() -> None:
    """A kernel that can do both would be tested on one of them."""
    assert {case.causal for case in drawn(100, Supports(non_causal=True))} == {True, False}


def test_tiles_of_queries_are_met_at_both_ends() -> None:
    """15, 16 and 17 query tokens are where a matrix instruction is not full, full, and one too few."""
    lens = Counter(n for case in drawn(1500, sizes=GPU_SIZES) for n in case.query_lens)
    assert all(lens[n] for n in (0, 1, 2, 15, 16, 17, 31, 32, 33))


def test_no_case_is_much_more_work_than_those_of_other_problems() -> None:
    """On the interpreter and a busy machine, a correct kernel would be reported as one that hangs."""
    most = max(sum(-(-n // 16) for n in case.row_lens) * case.num_q_heads for case in drawn(1500))
    assert most <= 5 * max(CPU_SIZES.work)


WINDOWS = Supports(variants=("window",))


def shares(problem: Problem, supports: Supports, count: int = 1000) -> Mapping[str, float]:
    counted = Counter(one for case in drawn_cases(problem, count, supports=supports) for one in of_case(case))
    return {name: number / count for name, number in counted.items()}


def test_rows_lose_their_first_tile_with_all_scores_on_one_side_of_it() -> None:
    """A maximum that is set to 0 by a tile before the window was met twice in 3,000 cases, with other numbers."""
    found = shares("paged_attention", WINDOWS)
    for tile in TILES:
        first = f"first tile of {tile} seen by other rows only"
        assert found[first] > 0.015
        assert found[f"{first}, all scores far below 0"] > 0.003
        assert found[f"a segment of tiles of {tile} seen by other rows only"] > 0.015
    assert found["first tile of 16 seen by other rows only, all scores far above 0"] > 0.003


def test_tiles_lie_behind_the_causal_edge_of_rows_without_any_window() -> None:
    """A tile that only the last row of a block sees would be given to all of them."""
    found = shares("paged_attention", Supports())
    assert all(found[f"last tile of {tile} seen by other rows only"] > 0.015 for tile in TILES)


def test_whole_tiles_lie_before_the_window_of_a_decoded_token() -> None:
    """What a kernel makes of a tile without any key, if it begins with the first one, was seen of small tiles only."""
    found = shares("paged_decode", WINDOWS)
    assert all(found[f"keys of {tile} before all that a row sees, all scores far below 0"] > 0.005 for tile in TILES)


@pytest.mark.parametrize("may_hide_all", [True, False])
def test_masks_hide_tiles_before_others_and_between_them(may_hide_all: bool) -> None:
    """Pages and chunks that are hidden were hardly ever as long as a tile."""
    found = shares("masked_attention", Supports(empty_sequences=may_hide_all), 2000)
    assert all(found[f"keys of {tile} before all that a row sees"] > 0.004 for tile in TILES)
    assert found["first tile of 64 seen by other rows only"] > 0.004
    assert found["a tile of 16 between others hidden"] > 0.002


def test_whole_tiles_of_a_tree_lie_between_two_of_its_branches() -> None:
    """A tile of query tokens that a row does not see, though it sees those before and after, came up in no tree."""
    found = shares("masked_attention", Supports(masks=("tree",)))
    assert found["a tile of 16 between others hidden"] > 0.004


def test_tiles_that_a_kernel_names_are_those_that_rows_part_at() -> None:
    """A kernel whose tiles have 96 keys would be tried at the ends of others."""
    options: Mapping[str, tuple[OptionValue, ...]] = {"block_n": (96,)}
    parted = 0
    for case in drawn_cases("paged_attention", 600, supports=WINDOWS, options=options):
        found: Any = case
        assert why_unsupported(WINDOWS, options, case) is None
        window = found.variant.window or max(found.seq_lens)
        starts = [[found.row_lens[row] - window for row in found.rows_of(seq)] for seq in range(found.num_seqs)]
        parted += any(min(of_seq) < 96 <= max(of_seq) for of_seq in starts if of_seq)
    assert parted > 20


def _past_a_block(found: Any, block: int) -> bool:
    """Whether a row of the second block of query tokens is not the sequence's last one."""
    return bool(max(found.query_lens) > block + 1)


def test_query_tokens_fill_more_than_one_block() -> None:
    """What is wrong in all blocks but the first, and not in the last row, was drawn in one case of a hundred."""
    drawn = drawn_cases("paged_attention", 1000)
    assert sum(_past_a_block(case, 16) for case in drawn) > 80
    assert sum(_past_a_block(case, 32) for case in drawn) > 8


@pytest.mark.parametrize("block", [32, 64])
def test_blocks_are_those_of_numbers_in_the_source(block: int) -> None:
    """A kernel whose blocks have 64 query tokens would be tried with 16 of them, as interpreted ones cost much."""
    found = drawn_cases("paged_attention", 1000, numbers=(block,))
    assert sum(_past_a_block(case, block) for case in found) > len(found) / 100
