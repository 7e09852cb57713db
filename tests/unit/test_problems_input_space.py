"""attnfuzz.problems.input_space and witnesses: what is possible is neither less nor much more than what is drawn."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import PROBLEMS, Problem
from attnfuzz.problems.input_space import InputSpace, Placement, pair_number
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.witnesses import LONGEST
from attnfuzz.strategies.cases import cases
from attnfuzz.strategies.sizes import CPU_SIZES, GPU_SIZES

SUPPORTS = [
    Supports(),
    Supports(unused_table_entries="garbage", lse="none"),
    Supports(
        dtypes=("float16",),
        head_sizes=(13, 64),
        block_sizes=(1, 16, 24),
        layouts=("NHD", "packed"),
        gqa_ratios=(1, 8),
        max_seq_len=33,
        max_num_splits=3,
        strides="last_contiguous",
        unused_table_entries="zero",
        empty_sequences=False,
    ),
    Supports(block_sizes=(1,), max_seq_len=1, strides="contiguous", head_sizes=(16,), dtypes=("float32",)),
    Supports(v_head_sizes="any", layouts=("interleaved", "HND")),
    Supports(head_sizes=(192, 64), v_head_sizes=(64, 40)),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"tile": (16, 64)},
    {"num_splits": (1, 3, 8), "tile": (32,), "fast": (True, False)},
]


def pairs(placement: Placement) -> set[int]:
    """As the campaign counts them, one by one."""
    found = {pair_number(i, j) for i, j in combinations(placement.case, 2)}
    for row in placement.rows:
        found |= {pair_number(i, j) for i, j in product(placement.case, row)}
        found |= {pair_number(i, j) for i, j in combinations(row, 2)}
    return found


def axis_of(space: InputSpace, number: int) -> str:
    return next(axis for axis, numbers in space.numbers.items() if number in numbers.values())


@pytest.mark.parametrize("problem", PROBLEMS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_nothing_impossible_is_ever_drawn(problem: Problem, data: st.DataObject) -> None:
    """A pair left out as impossible would never be missed, although it could be tried and is not."""
    supports, options = data.draw(st.sampled_from(SUPPORTS)), data.draw(st.sampled_from(OPTIONS))
    sizes, device = data.draw(st.sampled_from([(CPU_SIZES, "cpu"), (GPU_SIZES, "cuda")]))
    case = data.draw(cases(problem, supports=supports, options=options, sizes=sizes))
    space = _space(problem, SUPPORTS.index(supports), OPTIONS.index(options), device)
    for pair in pairs(space.place(case)) - space.possible:
        one, other = divmod(pair, pair_number(1, 0))
        assert axis_of(space, one) == axis_of(space, other), (axis_of(space, one), axis_of(space, other), case)


_SPACES: dict[tuple[Problem, int, int, str], InputSpace] = {}


def _space(problem: Problem, supports: int, options: int, device: str) -> InputSpace:
    key = (problem, supports, options, device)
    if key not in _SPACES:
        _SPACES[key] = InputSpace(problem, SUPPORTS[supports], OPTIONS[options], longest=LONGEST[device])
    return _SPACES[key]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_most_of_what_is_possible_is_drawn(problem: Problem) -> None:
    """Holes that nobody can fill would hide those that matter."""
    space = InputSpace(problem, SUPPORTS[1], OPTIONS[1], longest=LONGEST["cpu"])
    seen: set[int] = set()

    @settings(max_examples=600, deadline=None, database=None, derandomize=True)
    @given(cases(problem, supports=SUPPORTS[1], options=OPTIONS[1], sizes=CPU_SIZES))
    def draw(case: Any) -> None:
        seen.update(pairs(space.place(case)))

    draw()
    assert len(seen & space.possible) / len(space.possible) > 0.85


def levels(space: InputSpace, axis: str) -> list[str]:
    return [name for name, number in space.numbers[axis].items() if number in space.reachable[axis]]


def test_a_declaration_limits_what_is_possible() -> None:
    """A hole in what a kernel does not support is not the campaign's fault."""
    space = InputSpace("paged_decode", SUPPORTS[2], OPTIONS[2])
    assert levels(space, "dtype") == ["float16"]
    assert levels(space, "head size") == ["pow2 to 64", "other to 16"]
    assert levels(space, "GQA ratio") == ["1", "pow2 to 8"]
    assert levels(space, "page size") == ["1", "pow2 to 16", "other over 16"]
    assert levels(space, "cache strides") == ["contiguous", "outer_gap", "padded_rows", "transposed", "offset"]
    assert levels(space, "table padding") == ["none", "zero"]
    assert levels(space, "length") == ["1", "2 to 15", "16 to 127"]
    assert levels(space, "splits") == ["1", "2 to 4", "5 to 8"]
    merge = InputSpace("merge_states", SUPPORTS[2], {})
    assert levels(merge, "prefix LSE") == ["finite", "equal", "high", "low"]


@pytest.mark.parametrize(
    ("one", "other", "possible"),
    [
        (("head size", "other to 16"), ("layout", "packed"), False),
        (("head size", "pow2 to 64"), ("layout", "packed"), True),
        (("page size", "1"), ("last page", "1 token"), False),
        (("page size", "1"), ("last page", "1 short"), False),
        (("page size", "pow2 to 16"), ("last page", "1 token"), True),
        (("length", "0"), ("last page", "full"), False),
        (("length", "0"), ("needle", "first token"), False),
        (("length", "0"), ("needle", "none"), True),
        (("length", "0"), ("table padding", "none"), False),
        (("length", "1024 on"), ("split filling", "empty split"), False),
        (("splits", "1"), ("split filling", "even"), False),
        (("sequences", "1"), ("page order", "shared"), False),
        (("sequences", "several, equal"), ("page order", "shared"), True),
        (("option tile", "16"), ("last tile", "1 short"), True),
        (("dtype", "float32"), ("split filling", "empty split"), True),
        (("V head size", "smaller"), ("layout", "interleaved"), False),
        (("V head size", "larger"), ("layout", "packed"), True),
        (("V head size", "smaller"), ("head size", "other to 16"), False),
    ],
)
def test_what_excludes_each_other_is_known(one: tuple[str, str], other: tuple[str, str], possible: bool) -> None:
    """Arithmetic forbids some pairs, and a page full of holes that cannot be filled is not looked at twice."""
    supports = Supports(head_sizes=(13, 64), v_head_sizes="any")
    space = InputSpace("paged_decode", supports, {"tile": (16, 64), "num_splits": (1, 2, 3)})
    pair = sorted(space.numbers[axis][level] for axis, level in (one, other))
    assert (pair_number(*pair) in space.possible) == possible


def test_the_longest_sequences_are_those_that_strategies_draw() -> None:
    """Lengths beyond them would be holes for ever, or shorter ones taken for impossible."""
    assert {"cpu": CPU_SIZES.max_seq_len, "cuda": GPU_SIZES.max_seq_len} == LONGEST


def test_numbers_do_not_depend_on_what_is_possible() -> None:
    """Workers count without finding out what is possible, and the report looks their numbers up."""
    narrow = Declaration(name="k", problem="paged_decode", supports=SUPPORTS[3])
    wide = InputSpace("paged_decode", SUPPORTS[0], {})
    assert InputSpace(narrow.problem, narrow.supports, narrow.options, longest=1).numbers == wide.numbers
    flat = [number for numbers in wide.numbers.values() for number in numbers.values()]
    assert flat == list(range(wide.num_levels))
