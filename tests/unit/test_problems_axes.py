"""Axes of the input space: a case lies where a reader of the report would put it."""

from __future__ import annotations

from typing import Any

import pytest

from attnfuzz.cases.facets import Axis, Domain, facets_of
from attnfuzz.cases.facets.facet import classes, size_class
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
from attnfuzz.problems.recipes import Pages, Values
from attnfuzz.problems.supports import Supports


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
