"""The input space of one kernel: on which level of each axis a case lies. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from attnfuzz.cases.facets import Axis, Domain, facets_of
from attnfuzz.problems.cases import Case
from attnfuzz.problems.combinations import narrowed
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.module import Problem, case_type_of
from attnfuzz.problems.supports import OptionValue, Supports

_MAX_LEVELS = 1 << 12


def pair_number(first: int, second: int) -> int:
    """One number for a pair of levels, ``first <= second``."""
    return first * _MAX_LEVELS + second


def levels_of(pair: int) -> tuple[int, int]:
    """The two levels of a ``pair_number``."""
    return divmod(pair, _MAX_LEVELS)


class CaseLevels(NamedTuple):
    """The levels of a case: those of the whole, and those of each distinct kind of sequence in it."""

    case: tuple[int, ...]
    rows: frozenset[tuple[int, ...]]


class InputSpace:
    """Numbers the levels of all axes of a kernel, one axis after the other: a case on a level has that feature."""

    def __init__(self, problem: Problem, supports: Supports, options: Mapping[str, tuple[OptionValue, ...]]) -> None:
        domain = Domain(problem, narrowed(problem, supports), options)
        self._facets = facets_of(case_type_of(problem))
        case = [axis for facet in self._facets for axis in facet.axes(domain)]
        rows = [axis for facet in self._facets for axis in facet.row_axes(domain)]
        self.axes: tuple[Axis, ...] = (*case, *rows)
        self.levels: tuple[Feature, ...] = tuple(level for axis in self.axes for level in axis.features)
        self.num_levels = len(self.levels)
        self.numbers = dict(zip(self.levels, range(_MAX_LEVELS), strict=False))
        self._case, self._rows = ([(axis.of, self._numbers_on(axis)) for axis in some] for some in (case, rows))
        self._place_row = lru_cache(maxsize=1 << 14)(self._levels_of_row)

    def place(self, case: Case) -> CaseLevels:
        """Where ``case`` lies."""
        levels = [numbers[level] for of, numbers in self._case for level in of(case)]
        rows = (row for facet in self._facets for row in facet.rows(case))
        return CaseLevels(tuple(levels), frozenset(map(self._place_row, rows)))

    def _numbers_on(self, axis: Axis) -> dict[str, int]:
        return {level.level: self.numbers[level] for level in axis.features}

    def _levels_of_row(self, row: Any) -> tuple[int, ...]:
        return tuple(numbers[level] for of, numbers in self._rows for level in of(row))
