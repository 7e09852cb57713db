"""Query lengths: every kind of batch, around the tiles that kernels cut queries into, and never beyond a limit."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from attnfuzz.cases.facets import Domain, facets_of
from attnfuzz.problems.cases import PagedAttentionCase
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies import CPU_SIZES, GPU_SIZES, Sizes
from tests.unit.drawing import drawn_cases


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
    """Every causal kernel would fail; or one that can do both would be tested on one of them."""
    assert all(case.causal for case in drawn(100))
    assert {case.causal for case in drawn(100, Supports(non_causal=True))} == {True, False}


def test_tiles_of_queries_are_met_at_both_ends() -> None:
    """15, 16 and 17 query tokens are where a matrix instruction is not full, full, and one too few."""
    lens = Counter(n for case in drawn(1500, sizes=GPU_SIZES) for n in case.query_lens)
    assert all(lens[n] for n in (0, 1, 2, 15, 16, 17, 31, 32, 33))


@pytest.mark.parametrize(
    "limits",
    [
        {"max_query_len": 1},
        {"max_query_len": 16, "max_seq_len": 20},
        {"empty_sequences": False},
        {"padding_tokens": False},
    ],
    ids=["decode", "short", "busy", "unpadded"],
)
def test_limits_of_a_kernel_hold(limits: dict[str, int]) -> None:
    """A kernel would be given what it never said it takes."""
    supports = Supports(**limits)  # type: ignore[arg-type]  # any limit
    for case in drawn(60, supports):
        assert supports.max_query_len is None or case.max_query_len <= supports.max_query_len
        assert supports.max_seq_len is None or case.max_seq_len <= supports.max_seq_len
        assert supports.empty_sequences or min(case.query_lens) > 0
        assert supports.padding_tokens or not case.padding_tokens


def test_no_case_is_much_more_work_than_those_of_other_problems() -> None:
    """On the interpreter and a busy machine, a correct kernel would be reported as one that hangs."""
    most = max(sum(-(-n // 16) for n in case.row_lens) * case.num_q_heads for case in drawn(1500))
    assert most <= 5 * max(CPU_SIZES.work)
