"""Where cases and their sequences lie in the space of inputs that a report counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnfuzz.cases.facets import Axis, Domain, facets_of
from attnfuzz.cases.facets.facet import classes, size_class
from attnfuzz.cases.facets.rows import Row
from attnfuzz.cases.features import InputSpace, levels_of, pair_number
from attnfuzz.problems.cases import (
    PROBLEMS,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedDecodeCase,
    Problem,
    case_type_of,
)
from attnfuzz.problems.choices import BLOCK_SIZES, GQA_RATIOS, HEAD_SIZES, default_scale
from attnfuzz.problems.recipes import Needle, Pages, Values
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies.cases import cases
from tests.sample_cases import paged_case


def paged(**fields: Any) -> PagedDecodeCase:
    base: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 16, "scale": default_scale(16)}
    return PagedDecodeCase(**{**base, "block_size": 4, "seq_lens": (5,), **fields})


def case_axes(problem: Problem, **options: Any) -> list[Axis]:
    domain = Domain(problem, Supports(), options)
    return [axis for facet in facets_of(case_type_of(problem)) for axis in facet.axes(domain)]


def levels(case: Case) -> dict[str, set[str]]:
    return {axis.name: set(axis.of(case)) for axis in case_axes(case.problem)}


@pytest.mark.parametrize(
    ("fields", "axis", "expected"),
    [
        ({"dtype": "bfloat16"}, "dtype", {"bfloat16"}),
        ({"head_size": 80}, "head size", {"other to 128"}),
        ({"head_size": 256}, "head size", {"pow2 over 128"}),
        ({"num_q_heads": 12}, "GQA ratio", {"other over 8"}),
        ({"num_q_heads": 6, "num_kv_heads": 3}, "KV heads", {"other"}),
        ({"block_size": 1}, "page size", {"1"}),
        ({"block_size": 24}, "page size", {"other over 16"}),
        ({"seq_lens": (5, 5)}, "sequences", {"several, equal"}),
        ({"seq_lens": (5, 6)}, "sequences", {"several, ragged"}),
        ({"options": {"num_splits": 8}}, "splits", {"5 to 8"}),
        ({"layout": "HND"}, "layout", {"HND"}),
        ({"strides": {"q": "offset"}}, "cache strides", {"contiguous"}),
        ({"strides": {"q": "offset"}}, "other strides", {"offset"}),
        ({"strides": {"k_cache": "offset", "v_cache": "transposed"}}, "cache strides", {"offset", "transposed"}),
        ({"pages": Pages(order="reversed", shared_blocks=1)}, "page order", {"reversed"}),
        ({"pages": Pages(shared_blocks=1), "seq_lens": (5, 5)}, "page order", {"identity", "shared"}),
        ({"pages": Pages(padding="garbage")}, "table padding", {"none"}),
        ({"pages": Pages(padding="garbage", extra_columns=1)}, "table padding", {"garbage"}),
        ({"pages": Pages(padding="garbage"), "seq_lens": (5, 1)}, "table padding", {"garbage"}),
        ({"pages": Pages(padding="garbage"), "seq_lens": (0,)}, "table padding", {"garbage"}),
        ({"values": Values(logit_exponent=8)}, "logits", {"huge"}),
        ({"scale": 1.0}, "scale", {"other"}),
    ],
)
def test_a_case_lies_where_it_should(fields: dict[str, Any], axis: str, expected: set[str]) -> None:
    """A report would claim that something was tried which never was."""
    assert levels(paged(**fields))[axis] == expected


def test_other_problems_have_axes_of_their_own() -> None:
    """Dead rows and LSE layouts are where dense and merging kernels go wrong."""
    dense = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, scale=0.25, seq_lens=(3,), extra_rows=2)
    assert levels(dense)["dead rows"] == {"some"}
    merge = MergeStatesCase(num_q_heads=3, head_size=16, num_tokens=17, strides={"output_lse": "transposed"})
    assert levels(merge)["tokens"] == {"over 16"}
    assert levels(merge)["result strides"] == {"transposed"}


def test_an_option_with_few_choices_is_an_axis() -> None:
    """Tiles and modes decide what code runs; numbers of splits are told by an axis of every kernel."""
    options: dict[str, Any] = {
        "tile": (16, 32),
        "num_splits": (1, 8),
        "fast": (False, True),
        "only": ("one",),
        "many": tuple(range(1, 20)),
    }
    axes = {axis.name: axis for axis in case_axes("paged_decode", **options) if "option" in axis.name}
    assert list(axes) == ["option tile", "option fast"]
    case = paged(options={"tile": 32, "num_splits": 8, "fast": True, "only": "one", "many": 1})
    assert axes["option tile"].of(case) == ("32",)
    assert axes["option fast"].of(case) == ("True",)


@pytest.mark.parametrize(("values", "limits"), [(HEAD_SIZES, (16, 64, 128)), (BLOCK_SIZES, (16,)), (GQA_RATIOS, (8,))])
def test_every_size_has_a_class(values: tuple[int, ...], limits: tuple[int, ...]) -> None:
    """A case with such a size would end the worker; a class without a size would be a hole for ever."""
    found = {size_class(value, limits) for value in values}
    assert found <= set(classes(limits))
    assert set(classes(limits)) - found <= {"1"}


def test_axes_have_distinct_names_and_levels() -> None:
    """Counts of one level would be added to those of another."""
    for problem in PROBLEMS:
        axes = case_axes(problem)
        assert len({axis.name for axis in axes}) == len(axes)
        assert all(len(set(axis.levels)) == len(axis.levels) for axis in axes)


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
    case = paged_case(
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


SUPPORTS = [Supports(), Supports(v_head_sizes="any", layouts=("interleaved", "HND"))]
ALL_OPTIONS: list[dict[str, Any]] = [{}, {"num_splits": (1, 3, 8), "tile": (32,), "fast": (True, False)}]


def axis_of(space: InputSpace, number: int) -> str:
    return space.levels[number].field


@pytest.mark.parametrize("problem", PROBLEMS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_case_that_is_drawn_has_a_place(problem: Problem, data: st.DataObject) -> None:
    """A level that no axis knows would end the worker that counts it."""
    supports, options = data.draw(st.sampled_from(SUPPORTS)), data.draw(st.sampled_from(ALL_OPTIONS))
    space = InputSpace(problem, supports, options)
    placement = space.place(data.draw(cases(problem, supports=supports, options=options)))
    assert {"dtype", "head size"} <= {axis_of(space, number) for number in placement.case}
    assert all(0 <= number < space.num_levels for row in placement.rows for number in row)


def test_numbers_do_not_depend_on_what_is_supported() -> None:
    """Workers count by what a kernel declares when it joins, and the report looks their numbers up later."""
    narrow = Supports(block_sizes=(1,), max_seq_len=1, strides="contiguous", head_sizes=(16,), dtypes=("float16",))
    wide = InputSpace("paged_decode", Supports(), {})
    assert InputSpace("paged_decode", narrow, {}).numbers == wide.numbers
    assert list(wide.numbers.values()) == list(range(wide.num_levels))
    assert len({(level.field, level.value) for level in wide.levels}) == wide.num_levels
    assert levels_of(pair_number(3, 17)) == (3, 17)
