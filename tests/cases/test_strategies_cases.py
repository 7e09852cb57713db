"""Cases as they are drawn, and what Hypothesis shrinks them to."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from attnfuzz.cases.features import features
from attnfuzz.cases.supported import why_unsupported
from attnfuzz.minimise import minimise
from attnfuzz.problems.boundaries import tile_sizes
from attnfuzz.problems.cases import PROBLEMS, AttentionCase, Case, PagedDecodeCase, Problem, decode_case, encode_case
from attnfuzz.problems.choices import LARGE_BLOCK_SIZES, LARGE_GQA_RATIOS, LARGE_HEAD_SIZES, default_scale
from attnfuzz.problems.limits import DEFAULT_LIMIT_BYTES, case_nbytes
from attnfuzz.problems.quantised_kv import KV_DTYPES, KV_GRANULARITIES
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import DTYPES, LAYOUTS, Supports
from attnfuzz.problems.variants import VARIANTS
from attnfuzz.strategies import CPU_SIZES, GPU_SIZES, Sizes, cases, draw_formats
from tests.common.drawing import drawn_cases
from tests.common.named_features import words

OPTIONS = {"tile": (16, 32, 64), "num_splits": (1, 2, 8)}
EVERYTHING = Supports(strides="any", unused_table_entries="garbage", v_head_sizes="any")
ATTENTION: tuple[Problem, ...] = ("dense_decode", "paged_decode", "split_decode")


@cache
def drawn(problem: Problem, sizes: Sizes = CPU_SIZES, draws: int = 700) -> list[Any]:
    return drawn_cases(problem, draws, supports=EVERYTHING, options=OPTIONS, sizes=sizes)


def subsets(values: tuple[Any, ...]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.sampled_from(values), min_size=1, unique=True).map(tuple)


SUPPORTS = st.builds(
    Supports,
    dtypes=subsets(DTYPES),
    head_sizes=st.none() | subsets((8, 13, 64, 80, 256)).map(lambda sizes: (*sizes, 24)),
    v_head_sizes=st.sampled_from(("equal", "any")) | subsets((8, 13, 100)).map(lambda sizes: (*sizes, 24, 16)),
    block_sizes=st.none() | subsets((1, 3, 16, 256, 1000)),
    layouts=subsets(LAYOUTS),
    gqa_ratios=st.none() | subsets((1, 5, 24, 128)),
    max_seq_len=st.none() | st.sampled_from((1, 2, 16, 100)),
    max_num_splits=st.none() | st.sampled_from((1, 2, 6)),
    strides=st.sampled_from(("any", "last_contiguous", "serving", "contiguous")),
    unused_table_entries=st.sampled_from(("zero", "valid", "garbage")),
    empty_sequences=st.booleans(),
    lse=st.sampled_from(("natural", "base2", "none")),
    lse_layout=st.sampled_from(("HT", "TH")),
    max_query_len=st.none() | st.sampled_from((1, 16)),
    padding_tokens=st.booleans(),
    non_causal=st.booleans(),
    variants=st.just(()) | subsets(VARIANTS),
    kv_dtypes=st.just(()) | subsets(KV_DTYPES),
    kv_scales=subsets(KV_GRANULARITIES),
)

NARROW = Supports(
    dtypes=("float32",), head_sizes=(80,), block_sizes=(24,), layouts=("packed",), gqa_ratios=(7,), max_seq_len=17,
    max_num_splits=3, strides="last_contiguous", unused_table_entries="zero", empty_sequences=False, lse="none",
)  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS)
@settings(max_examples=60, phases=[Phase.generate], database=None, derandomize=True, deadline=None)
@given(data=st.data(), supports=SUPPORTS, sizes=st.sampled_from((CPU_SIZES, GPU_SIZES)))
def test_no_case_is_unsupported(problem: Problem, data: st.DataObject, supports: Supports, sizes: Sizes) -> None:
    """A kernel would be judged by a case that it never claimed to take."""
    case = data.draw(cases(problem, supports=supports, options=OPTIONS, sizes=sizes))
    assert why_unsupported(supports, OPTIONS, case) is None
    assert decode_case(problem, encode_case(case)) == case


@pytest.mark.by_day
@pytest.mark.parametrize("supports", [Supports(), NARROW], ids=["everything", "narrow"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_no_draw_is_thrown_away(problem: Problem, supports: Supports) -> None:
    """Time would go into draws that are rejected, and what is left would be one-sided."""
    counts = {"begun": 0, "drawn": 0}
    strategy = cases(problem, supports=supports, options=OPTIONS)

    @settings(max_examples=200, phases=[Phase.generate], database=None, derandomize=True, deadline=None)
    @given(st.data())
    def draw(data: st.DataObject) -> None:
        counts["begun"] += 1
        data.draw(strategy)
        counts["drawn"] += 1

    draw()
    assert counts["begun"] == counts["drawn"] >= 200


@pytest.mark.by_day
@pytest.mark.parametrize("sizes", [CPU_SIZES, GPU_SIZES], ids=["cpu", "gpu"])
@pytest.mark.parametrize("problem", ATTENTION)
def test_sizes_are_kept(problem: Problem, sizes: Sizes) -> None:
    """A case would take minutes in the interpreter, or more memory than the machine has."""
    for case in drawn(problem, sizes):
        assert case.num_seqs <= sizes.max_seqs
        assert max(case.seq_lens) <= sizes.max_seq_len
        assert sum(case.seq_lens) <= sizes.max_tokens
        assert case.num_q_heads <= sizes.max_heads
        size = max(case.head_size, case.value_size)
        assert case.num_q_heads * size <= sizes.max_head_elements
        assert case.num_kv_heads * size * sum(case.seq_lens) <= sizes.max_cache_elements
        assert case_nbytes(case) <= DEFAULT_LIMIT_BYTES


def test_merges_of_the_largest_heads_fit() -> None:
    """1,024 tokens of eight heads of 1,024 cannot be judged: each such draw would be told as an error of attnfuzz."""
    sizes = replace(GPU_SIZES, work=GPU_SIZES.work[-1:])
    drawn_of_them = drawn_cases("merge_states", 300, supports=Supports(head_sizes=(1024,)), sizes=sizes)
    assert max(map(case_nbytes, drawn_of_them)) <= DEFAULT_LIMIT_BYTES


def work(case: AttentionCase) -> int:
    """Steps of a kernel that advances by its tile, or by 16 tokens if it has none among its options."""
    step = min((CPU_SIZES.tile, *tile_sizes(case.options))) if tile_sizes(case.options) else 16
    return case.num_q_heads * sum(max(1, -(-length // step)) for length in case.seq_lens)


@pytest.mark.parametrize("problem", ATTENTION)
def test_cases_for_the_interpreter_are_cheap(problem: Problem) -> None:
    """A campaign on the CPU would try a case a second instead of ten."""
    costs = sorted(work(case) for case in drawn(problem))
    assert statistics.median(costs) <= 12
    assert costs[-1] <= 2 * max(CPU_SIZES.work)


def test_cases_for_a_gpu_reach_thousands_of_tokens() -> None:
    """Errors that need many tiles, many splits or many rows would not be met on a GPU."""
    found = drawn("paged_decode", GPU_SIZES, draws=2100)  # one case in some 500 is that long
    assert max(max(case.seq_lens) for case in found) > 2000
    assert max(case.num_seqs for case in found) >= 33
    assert max(case.num_q_heads for case in found) >= 48
    assert statistics.median(work(case) for case in found) < 100


@pytest.mark.parametrize("problem", ATTENTION)
def test_half_of_the_batches_are_ragged_and_some_rows_are_empty(problem: Problem) -> None:
    """Errors that need rows of different lengths, or a row without keys, would be rare."""
    found = drawn(problem)
    assert sum(len(set(case.seq_lens)) > 1 for case in found) > len(found) // 3
    assert sum(0 in case.seq_lens for case in found) > len(found) // 8


def features_in(problem: Problem) -> set[str]:
    return set().union(*(words(features(case)) for case in drawn(problem)))


SHARED = {
    "dtype=bfloat16", "dtype=float32", "head_size not pow2", "head_size>128", "num_kv_heads>1", "gqa_ratio>1",
    "gqa_ratio not pow2", "num_seqs>1", "ragged", "empty sequence", "keys=integers", "keys=normal", "keys=rising",
    "keys=falling", "keys=negative", "values=integers", "values=normal", "values=large", "values=small",
    "logit_exponent>0", "logit_exponent<0", "needles", "scale", "num_splits>1", "empty split", "strides:q=every_other",
    "strides:seq_lens=every_other", "strides:q=transposed", "strides:q=padded_rows", "strides:q=offset",
    "option tile=16", "option tile=32", "option tile=64",
}  # fmt: skip
PAGED = {
    "layout=HND", "layout=packed", "layout=interleaved", "block_size not pow2", "seq_len>block_size",
    "partial last page", "pages=reversed", "pages=shuffled", "shared pages", "extra columns", "spare blocks",
    "padding=wrong_page", "padding=garbage", "strides:k_cache=transposed", "strides:v_cache=padded_rows",
    "strides:block_table=padded_rows",
}  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (
            "dense_decode",
            SHARED | {"extra rows", "strides:k=transposed", "strides:v=every_other", "strides:lse=offset"},
        ),
        ("paged_decode", SHARED | PAGED | {"strides:out=transposed"}),
        ("split_decode", SHARED | PAGED | {"strides:partial_out=transposed", "strides:partial_lse=every_other"}),
    ],
)
def test_every_feature_is_drawn_within_700_cases(problem: Problem, expected: set[str]) -> None:
    """A class of bugs would be out of reach of a short campaign."""
    assert expected <= features_in(problem)


def test_every_combination_of_states_is_merged_within_700_cases() -> None:
    """A merge that fails for one combination of empty and far-apart states would pass."""
    kinds = ("finite", "equal", "high", "low", "-inf", "+inf")
    pairs = {f"lse {prefix}/{suffix}" for prefix in kinds for suffix in kinds} - {"lse finite/finite"}
    others = {"num_tokens>1", "num_q_heads>1", "strides:suffix_lse=transposed", "strides:prefix_output=padded_rows"}
    assert pairs | others <= features_in("merge_states")


def test_head_sizes_ratios_and_page_sizes_are_all_drawn() -> None:
    """A size that breaks kernels would never be tried."""
    found: list[PagedDecodeCase] = [*drawn("paged_decode"), *drawn("split_decode")]
    assert {case.head_size for case in found} == {13, 16, 40, 64, 72, 80, 96, 128, 192, 256}
    assert {1, 2, 3, 4, 5, 7, 8, 16, 17, 24} <= {case.gqa_ratio for case in found}
    wide = [case for case in found if case.gqa_ratio > 16 and case.num_kv_heads > 1]
    assert len(wide) >= len(found) // 500  # a mistake at the border of two wide groups shows in nothing else
    assert {1, 2, 3, 7, 16, 24, 100, 256} <= {case.block_size for case in found}


def ends_near_page(seq_len: int, block_size: int, rest: int) -> bool:
    return seq_len > block_size > 3 and (seq_len - rest) % block_size == 0


def test_lengths_of_cases_reach_their_own_boundaries() -> None:
    """Lengths would surround the boundaries of some page size, but not of the one that the case has."""
    found: list[PagedDecodeCase] = drawn("paged_decode")
    for rest in (0, 1, -1):
        hits = [case for case in found if any(ends_near_page(n, case.block_size, rest) for n in case.seq_lens)]
        assert len(hits) > len(found) // 50


def test_lengths_with_splits_are_often_more_than_a_tile() -> None:
    """Kernels that hand out whole tiles would merge nothing in nearly all cases, and their merges go untested."""
    found = [case for case in drawn("paged_decode") if case.options["num_splits"] > 1]
    assert sum(max(case.seq_lens) > case.options["tile"] for case in found) > 0.4 * len(found)
    never_split = [case for case in drawn("paged_decode") if case.options["num_splits"] == 1]
    assert sum(max(case.seq_lens) <= case.options["tile"] for case in never_split) > 0.3 * len(never_split)


def test_query_heads_of_one_block_leave_room_for_tokens() -> None:
    """A block of 16 rows would pass for a tile of 16 tokens, and each of its heads for work: lengths would be short."""
    options = {"tile": (64,), "num_splits": (3,), "block_m": (16,)}
    found: list[PagedDecodeCase] = drawn_cases("paged_decode", 200, options=options)
    groups = [case for case in found if case.num_q_heads > case.num_kv_heads]
    assert sum(max(case.seq_lens) > 64 for case in groups) > len(groups) // 4


def test_groups_of_more_heads_than_a_block_are_drawn_where_it_is_an_option() -> None:
    """What only the last block of a group does wrong would be met in one case of fifty."""
    options = {"tile": (16,), "block_m": (16, 32)}
    groups = [case.gqa_ratio for case in drawn_cases("paged_attention", options=options)]
    assert sum(ratio > 16 for ratio in groups) > len(groups) // 20
    assert sum(ratio < 16 for ratio in groups) > 3 * len(groups) // 4


def test_heads_of_v_are_larger_and_smaller_and_seldom_multiples() -> None:
    """A kernel that takes K's size for V's would be right on all sizes drawn, or nearly all cases would be unusual."""
    found = drawn("paged_decode", CPU_SIZES)
    pairs = {(case.head_size, case.v_head_size) for case in found if case.v_head_size is not None}
    assert any(k < v for k, v in pairs)
    assert any(k > v for k, v in pairs)
    assert sum(k % v != 0 and v % k != 0 for k, v in pairs) > len(pairs) / 3
    assert any(k & (k - 1) == v & (v - 1) == 0 for k, v in pairs)
    assert any((k - 1).bit_length() == (v - 1).bit_length() for k, v in pairs)  # padded to the same block
    assert 0.2 < sum(case.v_head_size is not None for case in found) / len(found) < 0.5


def test_scale_follows_the_head_size_half_of_the_time() -> None:
    """A kernel that computes its own scale would fail, or pass, on every case."""
    found = drawn("dense_decode")
    usual = sum(case.scale == default_scale(case.head_size) for case in found)
    assert len(found) // 3 < usual < 2 * len(found) // 3


TILES = {"tile": (16, 32, 64)}


def shrunk(problem: Problem, fails: Callable[[Any], bool]) -> Case:
    return find(
        cases(problem, options=TILES),
        fails,
        random=random.Random(4),
        settings=settings(database=None, max_examples=4000),
    )


@pytest.mark.parametrize("problem", ["dense_decode", "paged_decode", "split_decode", "merge_states"])
def test_a_failure_of_every_case_shrinks_to_the_simplest_case(problem: Problem) -> None:
    """Users of the strategies would be shown details that have nothing to do with the failure."""
    assert shrunk(problem, lambda _: True) == simplest_case(problem, Supports(), TILES)


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
    assert words(features(shrunk(problem, fails), options=TILES)) == expected


LARGE = Supports(large_sizes=True, strides="any")
BLOCKS = {"block_m": (16, 32), "tile": (16, 64)}


def large_values(one: Any) -> set[tuple[str, int]]:
    """Those of a format or a case."""
    ratio = one.num_q_heads // (one.num_kv_heads or 1)
    found = {("head_size", one.head_size), ("block_size", one.block_size), ("gqa_ratio", ratio)}
    named = zip(
        ("head_size", "block_size", "gqa_ratio"), (LARGE_HEAD_SIZES, LARGE_BLOCK_SIZES, LARGE_GQA_RATIOS), strict=True
    )
    return found & {(name, size) for name, sizes in named for size in sizes}


def failing(supports: Supports, fails: Callable[[Any], bool], seed: int) -> Case:
    return find(
        cases("paged_decode", supports=supports, options=BLOCKS),
        fails,
        random=random.Random(seed),
        settings=settings(database=None, max_examples=20_000, phases=[Phase.generate]),
    )


@pytest.mark.parametrize("sizes", [CPU_SIZES, GPU_SIZES], ids=["cpu", "gpu"])
@pytest.mark.by_day("cpu")
def test_all_are_drawn_now_and_then(sizes: Sizes) -> None:
    """What kernels claim would never be tried, or half of the time go into cases that take ten times as long."""
    formats = draw_formats("paged_decode", supports=LARGE, options=BLOCKS, sizes=sizes, seed=0)
    drawn = [large_values(one) for one in islice(formats, 20_000)]
    assert len(set.union(*drawn)) == 9
    assert sum(map(bool, drawn)) < 0.1 * len(drawn)


def test_none_is_drawn_unless_it_is_declared() -> None:
    """A kernel whose tiles do not fit into shared memory with such heads would be told that it is broken."""
    formats = draw_formats("paged_decode", supports=Supports(), options=BLOCKS, sizes=GPU_SIZES, seed=0)
    assert not any(map(large_values, islice(formats, 5_000)))
    declared = Supports(large_sizes=True, head_sizes=(64,), block_sizes=(16,), gqa_ratios=(4,))
    formats = draw_formats("paged_decode", supports=declared, options=BLOCKS, sizes=GPU_SIZES, seed=0)
    assert not any(map(large_values, islice(formats, 5_000)))


def test_a_group_that_a_kernel_names_is_drawn_though_a_case_has_no_room_for_it() -> None:
    """A kernel for 128 query heads on one KV head would only be tried with 16, on a machine without a GPU."""
    supports = Supports(gqa_ratios=(16, 128))
    formats = draw_formats("paged_decode", supports=supports, options=BLOCKS, sizes=CPU_SIZES, seed=0)
    assert any(one.num_q_heads == 128 for one in islice(formats, 5_000))


@pytest.mark.parametrize("seed", range(4))
def test_what_does_not_matter_shrinks_away(seed: int) -> None:
    """A bug of all cases would be shown with 128 heads of 1,024, as if it took these."""
    case = failing(LARGE, lambda case: bool(large_values(case)), seed)
    assert why_unsupported(LARGE, BLOCKS, case) is None
    simplest = simplest_case("paged_decode", Supports(), BLOCKS)
    assert simplest_case("paged_decode", LARGE, BLOCKS) == simplest
    assert minimise(case, lambda _: True, supports=LARGE, options=BLOCKS) == simplest


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (lambda case: case.head_size > 512, {("head_size", 576)}),
        (lambda case: case.num_q_heads > 40 * case.num_kv_heads, {("gqa_ratio", 64)}),
        (lambda case: case.block_size > 300, {("block_size", 528)}),
    ],
    ids=["heads", "group", "pages"],
)
def test_what_matters_is_the_least_that_does(fails: Callable[[Any], bool], expected: set[tuple[str, int]]) -> None:
    """A report would show a larger case than is needed."""
    found = minimise(failing(LARGE, fails, 0), fails, supports=LARGE, options=BLOCKS)
    assert large_values(found) == expected
