"""Large heads, pages and groups: drawn of kernels that declare them, rarely, and gone after shrinking."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import Phase, find, settings

from attnfuzz.cases.supported import why_unsupported
from attnfuzz.minimise import minimise
from attnfuzz.problems.cases import Case
from attnfuzz.problems.choices import LARGE_BLOCK_SIZES, LARGE_GQA_RATIOS, LARGE_HEAD_SIZES
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies import CPU_SIZES, GPU_SIZES, Sizes, cases, draw_formats

LARGE = Supports(large_sizes=True, strides="any")
OPTIONS = {"block_m": (16, 32), "tile": (16, 64)}


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
        cases("paged_decode", supports=supports, options=OPTIONS),
        fails,
        random=random.Random(seed),
        settings=settings(database=None, max_examples=20_000, phases=[Phase.generate]),
    )


@pytest.mark.parametrize("sizes", [CPU_SIZES, GPU_SIZES], ids=["cpu", "gpu"])
@pytest.mark.by_day("cpu")
def test_all_are_drawn_now_and_then(sizes: Sizes) -> None:
    """What kernels claim would never be tried, or half of the time go into cases that take ten times as long."""
    formats = draw_formats("paged_decode", supports=LARGE, options=OPTIONS, sizes=sizes, seed=0)
    drawn = [large_values(one) for one in islice(formats, 20_000)]
    assert len(set.union(*drawn)) == 9
    assert sum(map(bool, drawn)) < 0.1 * len(drawn)


def test_none_is_drawn_unless_it_is_declared() -> None:
    """A kernel whose tiles do not fit into shared memory with such heads would be told that it is broken."""
    formats = draw_formats("paged_decode", supports=Supports(), options=OPTIONS, sizes=GPU_SIZES, seed=0)
    assert not any(map(large_values, islice(formats, 5_000)))
    declared = Supports(large_sizes=True, head_sizes=(64,), block_sizes=(16,), gqa_ratios=(4,))
    formats = draw_formats("paged_decode", supports=declared, options=OPTIONS, sizes=GPU_SIZES, seed=0)
    assert not any(map(large_values, islice(formats, 5_000)))


def test_a_group_that_a_kernel_names_is_drawn_though_a_case_has_no_room_for_it() -> None:
    """A kernel for 128 query heads on one KV head would only be tried with 16, on a machine without a GPU."""
    supports = Supports(gqa_ratios=(16, 128))
    formats = draw_formats("paged_decode", supports=supports, options=OPTIONS, sizes=CPU_SIZES, seed=0)
    assert any(one.num_q_heads == 128 for one in islice(formats, 5_000))


@pytest.mark.parametrize("seed", range(4))
def test_what_does_not_matter_shrinks_away(seed: int) -> None:
    """A bug of all cases would be shown with 128 heads of 1,024, as if it took these."""
    case = failing(LARGE, lambda case: bool(large_values(case)), seed)
    assert why_unsupported(LARGE, OPTIONS, case) is None
    simplest = simplest_case("paged_decode", Supports(), OPTIONS)
    assert simplest_case("paged_decode", LARGE, OPTIONS) == simplest
    assert minimise(case, lambda _: True, supports=LARGE, options=OPTIONS) == simplest


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
    found = minimise(failing(LARGE, fails, 0), fails, supports=LARGE, options=OPTIONS)
    assert large_values(found) == expected
