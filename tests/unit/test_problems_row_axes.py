"""Axes of a row: where a sequence ends in its pages, tiles and splits, and where its needles lie."""

from __future__ import annotations

from typing import Any

import pytest

from attnfuzz.cases.facets import Axis, Domain, facets_of
from attnfuzz.cases.facets.rows import Row
from attnfuzz.problems.cases import Case, MergeStatesCase, PagedDecodeCase, Problem, case_type_of
from attnfuzz.problems.recipes import Needle, Values
from attnfuzz.problems.supports import Supports


def row_axes(problem: Problem, options: dict[str, Any]) -> list[Axis]:
    domain = Domain(problem, Supports(), options)
    return [axis for facet in facets_of(case_type_of(problem)) for axis in facet.row_axes(domain)]


def rows_of(case: Case) -> list[Any]:
    return [row for facet in facets_of(type(case)) for row in facet.rows(case)]


OPTIONS: dict[str, Any] = {"tile": (16, 32), "num_splits": (1, 3)}
AXES = {axis.name: axis for axis in row_axes("paged_decode", OPTIONS)}


def on(axis: str, **fields: Any) -> set[str]:
    return set(AXES[axis].of(Row(**{"length": 40, "page": 8, "tiles": (16,), "num_splits": 1, **fields})))


@pytest.mark.parametrize(
    ("axis", "fields", "expected"),
    [
        ("length", {"length": 0}, {"0"}),
        ("length", {"length": 127}, {"16 to 127"}),
        ("length", {"length": 1024}, {"1024 on"}),
        ("last page", {"length": 40}, {"full"}),
        ("last page", {"length": 41}, {"1 token"}),
        ("last page", {"length": 39}, {"1 short"}),
        ("last page", {"length": 36}, {"between"}),
        ("last page", {"length": 0}, set()),
        ("last page", {"length": 3, "page": 2}, {"1 token", "1 short"}),
        ("last page", {"length": 3, "page": 1}, {"full"}),
        ("last tile", {"length": 33}, {"1 token"}),
        ("last tile", {"length": 33, "tiles": (16, 34)}, {"1 token", "1 short"}),
        ("split filling", {"num_splits": 1}, {"one split"}),
        ("split filling", {"num_splits": 4}, {"even"}),
        ("split filling", {"num_splits": 3}, {"uneven"}),
        ("split filling", {"length": 5, "num_splits": 4}, {"empty split"}),
        ("split filling", {"length": 0, "num_splits": 4}, {"empty split"}),
        ("needle", {}, {"none"}),
        ("needle", {"needles": (0,)}, {"first token", "page edge", "tile edge"}),
        ("needle", {"needles": (39,)}, {"last token", "page edge"}),
        ("needle", {"needles": (10,), "num_splits": 4}, {"split edge"}),
        ("needle", {"needles": (20,)}, set()),
        ("needle", {"needles": (20, 16)}, {"page edge", "tile edge"}),
    ],
)
def test_a_sequence_lies_where_it_should(axis: str, fields: dict[str, Any], expected: set[str]) -> None:
    """Boundaries are where kernels go wrong; a report that misplaces them says nothing."""
    assert on(axis, **fields) == expected


def test_sequences_that_are_alike_count_once() -> None:
    """A batch of hundreds of equal lengths would cost hundreds of times as much to place."""
    case = PagedDecodeCase(
        num_q_heads=1,
        num_kv_heads=1,
        head_size=16,
        scale=0.25,
        block_size=4,
        seq_lens=(7, 7, 9, 7),
        options={"tile": 16, "num_splits": 3},
        values=Values(needles=(Needle(1, 0, 0), Needle(1, 6, 0))),
    )
    assert set(rows_of(case)) == {Row(7, 4, (16,), 3), Row(9, 4, (16,), 3), Row(7, 4, (16,), 3, (0, 6))}


def test_pairs_of_states_are_rows_too() -> None:
    """That one pair has an empty prefix and another an empty suffix says nothing about a pair that has both."""
    pairs: Any = (("finite", "-inf"), ("+inf", "high"), ("finite", "-inf"))
    case = MergeStatesCase(num_q_heads=1, head_size=16, num_tokens=3, lse_pairs=pairs)
    assert set(rows_of(case)) == {("finite", "-inf"), ("+inf", "high")}
    prefix, suffix = row_axes("merge_states", {})
    assert (prefix.of(pairs[1]), suffix.of(pairs[1])) == (("+inf",), ("high",))


def test_only_axes_that_make_sense_are_there() -> None:
    """A kernel without tiles, pages or splits would show holes that nobody can fill."""
    assert [axis.name for axis in row_axes("dense_decode", {})] == ["length", "needle"]
    assert [axis.name for axis in row_axes("dense_decode", {"num_warps": (1, 2)})] == ["length", "needle"]
    assert "split filling" in [axis.name for axis in row_axes("split_decode", {})]
    assert set(AXES) == {"length", "last page", "last tile", "split filling", "needle"}
