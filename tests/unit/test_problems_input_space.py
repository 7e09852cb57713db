"""attnfuzz.cases.features: where a case lies."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnfuzz.cases.features import InputSpace, levels_of, pair_number
from attnfuzz.problems.cases import PROBLEMS, Problem
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies.cases import cases

SUPPORTS = [Supports(), Supports(v_head_sizes="any", layouts=("interleaved", "HND"))]
OPTIONS: list[dict[str, Any]] = [{}, {"num_splits": (1, 3, 8), "tile": (32,), "fast": (True, False)}]


def axis_of(space: InputSpace, number: int) -> str:
    return space.levels[number].field


@pytest.mark.parametrize("problem", PROBLEMS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_case_that_is_drawn_has_a_place(problem: Problem, data: st.DataObject) -> None:
    """A level that no axis knows would end the worker that counts it."""
    supports, options = data.draw(st.sampled_from(SUPPORTS)), data.draw(st.sampled_from(OPTIONS))
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
