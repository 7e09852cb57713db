"""Reducing a failing case: to the exact minimum, in few runs, and without losing anything when cut off."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, find, settings

from attnfuzz.cases.features import features
from attnfuzz.cases.supported import supports_case
from attnfuzz.minimise import minimise, simplifications, size_key
from attnfuzz.problems.cases import Case, PagedDecodeCase, Problem, encode_case
from attnfuzz.problems.recipes import Needle, Pages, Values
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import OptionValue, Supports
from attnfuzz.strategies import CPU_SIZES, GPU_SIZES, Sizes, cases

OPTIONS: dict[str, tuple[OptionValue, ...]] = {"tile": (16, 32, 64), "num_splits": (1, 2, 3, 8)}
ANY_STRIDES = Supports(strides="any")
Fails = Callable[[Any], bool]


def simplest(problem: Problem, **fields: Any) -> Case:
    return msgspec.structs.replace(simplest_case(problem, ANY_STRIDES, OPTIONS), **fields)


def failing(problem: Problem, fails: Fails, count: int, sizes: Sizes) -> Iterator[Case]:
    """``count`` unreduced cases, a different one for each seed."""
    unreduced = settings(database=None, max_examples=20_000, phases=[Phase.generate])
    for seed in range(count):
        yield find(
            cases(problem, supports=ANY_STRIDES, options=OPTIONS, sizes=sizes),
            fails,
            random=random.Random(seed),
            settings=unreduced,
        )


def reduced(case: Case, fails: Fails, **limits: Any) -> tuple[Case, list[Case]]:
    """The minimal case and all that were run."""
    run: list[Case] = []

    def still_fails(candidate: Case) -> bool:
        run.append(candidate)
        return fails(candidate)

    return minimise(case, still_fails, supports=ANY_STRIDES, options=OPTIONS, **limits), run


MINIMA: list[tuple[str, Problem, Fails, Case]] = [
    ("everything", "paged_decode", lambda case: True, simplest("paged_decode")),
    (
        "page boundary and odd ratio",
        "paged_decode",
        lambda case: any(n % case.block_size == 1 for n in case.seq_lens) and case.gqa_ratio > 1 and case.gqa_ratio % 2,
        simplest("paged_decode", num_q_heads=3, block_size=2),
    ),
    (
        "two sequences, one of them empty",
        "paged_decode",
        lambda case: case.num_seqs >= 2 and 0 in case.seq_lens,
        simplest("paged_decode", seq_lens=(1, 0)),
    ),
    (
        "bfloat16 and a large head",
        "dense_decode",
        lambda case: case.dtype == "bfloat16" and case.head_size > 64,
        simplest("dense_decode", dtype="bfloat16", head_size=72, scale=0.1178511306643486),
    ),
    (
        "more than 64 tokens",
        "dense_decode",
        lambda case: max(case.seq_lens) > 64,
        simplest("dense_decode", seq_lens=(65,)),
    ),
    (
        "second tile holds one token",
        "dense_decode",
        lambda case: any(n > 64 and n % 64 == 1 for n in case.seq_lens),
        simplest("dense_decode", seq_lens=(65,)),
    ),
    (
        "partial second page",
        "paged_decode",
        lambda case: any(n > case.block_size and n % case.block_size for n in case.seq_lens),
        simplest("paged_decode", seq_lens=(3,), block_size=2),
    ),
    (
        "page size not a power of two, two pages",
        "paged_decode",
        lambda case: case.block_size & (case.block_size - 1) and max(case.seq_lens) > case.block_size,
        simplest("paged_decode", seq_lens=(4,), block_size=3),
    ),
    (
        "all but one token of a tile",
        "paged_decode",
        lambda case: any(n % case.options["tile"] == case.options["tile"] - 1 for n in case.seq_lens),
        simplest("paged_decode", seq_lens=(15,), block_size=16),
    ),
    (
        "an empty split beside a full one",
        "split_decode",
        lambda case: any(0 < n <= (case.num_splits - 1) * -(-n // case.num_splits) for n in case.seq_lens),
        simplest("split_decode", num_splits=2),
    ),
    (
        "shuffled pages",
        "paged_decode",
        lambda case: case.pages.order == "shuffled" and max(case.seq_lens) > case.block_size,
        simplest("paged_decode", seq_lens=(2,), pages=Pages(order="shuffled")),
    ),
    (
        "a shared page",
        "paged_decode",
        lambda case: case.pages.shared_blocks and case.num_seqs > 1 and min(case.seq_lens[:2]) > 0,
        simplest("paged_decode", seq_lens=(1, 1), pages=Pages(shared_blocks=1)),
    ),
    (
        "strides of K with several heads",
        "paged_decode",
        lambda case: case.strides.get("k_cache") == "padded_rows" and case.num_kv_heads > 1,
        simplest("paged_decode", num_q_heads=2, num_kv_heads=2, strides={"k_cache": "padded_rows"}),
    ),
    (
        "a needle on the last of several tokens",
        "dense_decode",
        lambda case: any(0 < needle.position == case.seq_lens[needle.seq] - 1 for needle in case.values.needles),
        simplest("dense_decode", seq_lens=(2,), values=Values(needles=(Needle(seq=0, position=1, kv_head=0),))),
    ),
    (
        "very negative scores",
        "dense_decode",
        lambda case: case.values.keys == "negative" and case.values.logit_exponent >= 3,
        simplest("dense_decode", values=Values(keys="negative", logit_exponent=3)),
    ),
    (
        "both states empty",
        "merge_states",
        lambda case: any(
            case.lse_pairs[i % len(case.lse_pairs)] == ("-inf", "-inf")
            for i in range(case.num_tokens * case.num_q_heads)
        ),
        simplest("merge_states", lse_pairs=(("-inf", "-inf"),)),
    ),
    (
        "two tokens and padding columns",
        "merge_states",
        lambda case: case.num_tokens > 1 and case.head_size & (case.head_size - 1),
        simplest("merge_states", num_tokens=2, head_size=13),
    ),
]


@pytest.mark.by_day
@pytest.mark.parametrize("sizes", [CPU_SIZES, GPU_SIZES], ids=["cpu", "gpu"])
@pytest.mark.parametrize(("problem", "fails", "minimum"), [row[1:] for row in MINIMA], ids=[row[0] for row in MINIMA])
def test_every_start_ends_at_the_exact_minimum_in_few_runs(
    problem: Problem, fails: Fails, minimum: Case, sizes: Sizes
) -> None:
    """One bug would be reported as several, each with more than it needs, and reducing it would take minutes."""
    runs = []
    for case in failing(problem, fails, 10, sizes):
        found, run = reduced(case, fails)
        assert found == minimum
        runs.append(len(run))
    assert statistics.median(runs) <= 60
    assert max(runs) <= 100


@pytest.mark.parametrize("problem", ["dense_decode", "paged_decode", "split_decode", "merge_states"])
def test_what_is_proposed_is_smaller_supported_and_new(problem: Problem) -> None:
    """Reduction would go in circles, run a case twice, or leave what the kernel supports."""
    for case in failing(problem, lambda case: len(features(case)) > 8, 12, CPU_SIZES):
        proposed = list(simplifications(case, supports=ANY_STRIDES, options=OPTIONS))
        size = size_key(case, options=OPTIONS)
        assert len(proposed) > 8
        assert all(size_key(simpler, options=OPTIONS) < size for simpler in proposed)
        assert all(supports_case(ANY_STRIDES, OPTIONS, simpler) for simpler in proposed)
        assert len({encode_case(simpler) for simpler in proposed}) == len(proposed)


def test_the_first_jump_is_to_the_simplest_case() -> None:
    """A failure of every case would take dozens of runs to reduce."""
    for case in failing("paged_decode", lambda case: case.num_q_heads > 1, 3, CPU_SIZES):
        first = next(simplifications(case, supports=ANY_STRIDES, options=OPTIONS))
        assert first == simplest("paged_decode")


def test_nothing_simpler_than_the_simplest_case_is_proposed() -> None:
    """Reduction would never end, or end in something stranger than the simplest case."""
    for problem in ("dense_decode", "paged_decode", "split_decode", "merge_states"):
        assert not list(simplifications(simplest(problem), supports=ANY_STRIDES, options=OPTIONS))


def odd_sum(case: Any) -> bool:
    return bool(sum(case.seq_lens) % 7 == 3 and case.head_size % 3 != 1 and len(case.strides) != 1)


def test_no_simplification_of_the_result_fails() -> None:
    """The result would not be minimal although nothing stopped the search, whatever the failure depends on."""
    for case in failing("paged_decode", odd_sum, 8, CPU_SIZES):
        found, run = reduced(case, odd_sum)
        assert odd_sum(found)
        assert not any(odd_sum(simpler) for simpler in simplifications(found, supports=ANY_STRIDES, options=OPTIONS))
        assert len({encode_case(tried) for tried in run}) == len(run)
        assert encode_case(case) not in {encode_case(tried) for tried in run}


def test_results_stay_within_the_kernels_support() -> None:
    """The saved case would not be replayed, because its kernel does not support it."""
    supports = Supports(
        dtypes=("bfloat16",), head_sizes=(80, 128), block_sizes=(24, 48), gqa_ratios=(5, 7), empty_sequences=False,
        layouts=("HND", "packed"), strides="last_contiguous",
    )  # fmt: skip
    case = simplest(
        "paged_decode", dtype="bfloat16", head_size=128, num_q_heads=21, num_kv_heads=3, seq_lens=(30, 60, 5),
        block_size=48, layout="packed", strides={"q": "offset"},
    )  # fmt: skip
    found = minimise(case, lambda _: True, supports=supports, options=OPTIONS)
    assert found == simplest_case("paged_decode", supports, OPTIONS)


def big() -> Case:
    return simplest("dense_decode", seq_lens=(100, 90, 80), num_q_heads=12, num_kv_heads=3, head_size=128)


def test_max_calls_is_kept_and_the_smallest_so_far_returned() -> None:
    """A kernel that takes seconds to fail would block a worker."""
    found, run = reduced(big(), lambda case: case.num_q_heads >= 4, max_calls=5)
    assert len(run) == 5
    assert size_key(found) < size_key(big())
    assert reduced(big(), lambda _: True, max_calls=0) == (big(), [])


def test_a_deadline_in_the_past_runs_nothing() -> None:
    """A campaign would overrun its budget by the time that reducing takes."""
    assert reduced(big(), lambda _: True, deadline=time.monotonic() - 1) == (big(), [])


def test_each_smaller_case_is_told_when_it_is_found() -> None:
    """What was reached would be lost when the search is interrupted."""
    told: list[Case] = []

    def still_fails(case: Any) -> bool:
        if len(told) == 3:
            raise KeyboardInterrupt
        return bool(case.num_q_heads >= 4 and max(case.seq_lens) > 20)

    with pytest.raises(KeyboardInterrupt):
        minimise(big(), still_fails, supports=ANY_STRIDES, options=OPTIONS, on_smaller=told.append)
    sizes = [size_key(case, options=OPTIONS) for case in (big(), *told)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


def test_a_row_that_fails_for_its_numbers_becomes_the_only_one() -> None:
    """Rows that only hold the place of a failing one would stay in the case."""

    def fails(case: Any) -> bool:
        loud = case.values.keys == "negative" and case.values.logit_exponent >= 5
        rows = [
            (case.values.seed * 7 + seq * 3 + head) % 4
            for seq in range(case.num_seqs)
            for head in range(case.num_q_heads)
        ]
        return loud and 3 in rows

    values = Values(keys="negative", logit_exponent=5)
    case = simplest("paged_decode", num_q_heads=2, seq_lens=(1, 1, 1), values=values)
    smallest, run = reduced(case, fails)
    assert isinstance(smallest, PagedDecodeCase)
    assert (smallest.num_seqs, smallest.num_q_heads) == (1, 1)
    assert len(run) <= 100


def test_pages_out_of_order_need_no_second_sequence_to_share_one() -> None:
    """Whoever takes pages for neighbours would be shown two sequences, where one with its pages reversed says it."""

    def fails(case: Any) -> bool:
        apart = case.pages.order != "identity" or (case.num_seqs > 1 and case.pages.shared_blocks > 0)
        return apart and any(case.blocks_of(seq) > 1 for seq in range(case.num_seqs))

    start = simplest("paged_decode", seq_lens=(2, 2), pages=Pages(shared_blocks=1))
    assert fails(start)
    assert reduced(start, fails)[0] == simplest("paged_decode", seq_lens=(2,), pages=Pages(order="reversed"))


def test_numbers_are_not_tried_where_they_do_not_matter() -> None:
    """A bug that needs two rows would cost many runs more, each of them seconds where it hangs."""
    case = simplest("paged_decode", seq_lens=(1, 1))
    _, run = reduced(case, lambda case: case.num_seqs > 1)
    assert all(isinstance(candidate, PagedDecodeCase) and candidate.values.seed == 0 for candidate in run)


def test_a_gap_of_one_cache_is_that_of_both_when_it_becomes_two() -> None:
    """K and V of engines lie alike: a gap that matters would keep a case in the interleaved layout."""
    supports = Supports(strides="serving")
    plain = simplest_case("paged_decode", supports, {})
    case = msgspec.structs.replace(plain, layout="interleaved", seq_lens=(5,), strides={"k_cache": "outer_gap"})
    found = minimise(case, lambda case: "k_cache" in case.strides, supports=supports, options={})
    assert found == msgspec.structs.replace(plain, strides={"k_cache": "outer_gap", "v_cache": "outer_gap"})
