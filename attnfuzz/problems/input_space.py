"""The input space of one kernel: where a case lies, and which pairs of levels can occur together. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache, partial
from itertools import combinations, product
from typing import NamedTuple

from attnfuzz.problems.axes import Axis, cache_axes, case_axes, option_axes, v_head_size_axes, variant_axes
from attnfuzz.problems.cases import Case, Problem
from attnfuzz.problems.choices import kv_dtypes_of, variants_of
from attnfuzz.problems.row_axes import Row, row_axes, rows_of
from attnfuzz.problems.supports import OptionValue, Supports
from attnfuzz.problems.where import narrowed
from attnfuzz.problems.witnesses import LONGEST, Witness, witnesses

__all__ = ["InputSpace", "Placement", "pair_number"]

_MAX_LEVELS = 1 << 12


def pair_number(first: int, second: int) -> int:
    """One number for a pair of levels, ``first < second``."""
    return first * _MAX_LEVELS + second


class Placement(NamedTuple):
    """The levels of a case: those of the whole, and those of each distinct kind of sequence in it."""

    case: tuple[int, ...]
    rows: frozenset[tuple[int, ...]]


class _Group(NamedTuple):
    """Axes that depend on each other; ``partners``: a bit for every level that a level was seen with."""

    axes: set[str]
    partners: dict[int, int]


class InputSpace:
    """Numbers the levels of all axes of a kernel, one axis after the other: ``numbers[axis][level]``.

    ``longest``: tokens of the longest sequence that is drawn.
    """

    def __init__(
        self,
        problem: Problem,
        supports: Supports,
        options: Mapping[str, tuple[OptionValue, ...]],
        *,
        longest: int = LONGEST["cuda"],
    ) -> None:
        supports = narrowed(problem, supports)
        case, rows = self._case_axes(problem, supports, options), row_axes(problem, options)
        self.axes: tuple[Axis, ...] = (*case, *rows)
        number = iter(range(_MAX_LEVELS))
        self.numbers = {axis.name: {level: next(number) for level in axis.levels} for axis in self.axes}
        self.num_levels = next(number)
        self._case = [(axis.of, self.numbers[axis.name]) for axis in case]
        self._rows = [(axis.of, self.numbers[axis.name]) for axis in rows]
        self._place_row = lru_cache(maxsize=1 << 14)(self._levels_of_row)
        self._witnesses = partial(witnesses, problem, supports, options, longest=longest)

    @staticmethod
    def _case_axes(
        problem: Problem, supports: Supports, options: Mapping[str, tuple[OptionValue, ...]]
    ) -> tuple[Axis, ...]:
        variants = variant_axes(variants_of(problem, supports))
        caches = cache_axes(kv_dtypes_of(problem, supports), supports.kv_scales)
        sizes = v_head_size_axes(problem, supports)
        return (*case_axes(problem), *sizes, *option_axes(options), *variants, *caches)

    def place(self, case: Case) -> Placement:
        """Where ``case`` lies."""
        levels = [numbers[level] for of, numbers in self._case for level in of(case)]
        return Placement(tuple(levels), frozenset([self._place_row(row) for row in rows_of(case)]))

    @cached_property
    def reachable(self) -> dict[str, tuple[int, ...]]:
        """The levels of each axis that some supported case has."""
        found: dict[str, tuple[int, ...]] = {}
        for axis, numbers in self.numbers.items():
            groups = [group for group in self._dependent if axis in group.axes]
            found[axis] = tuple(n for n in numbers.values() if all(n in group.partners for group in groups))
        return found

    @cached_property
    def possible(self) -> frozenset[int]:
        """Pairs of levels of two axes that some supported case has (some sequence of one, for two axes of those)."""
        found: set[int] = set()
        for (one, first), (other, second) in combinations(self.reachable.items(), 2):
            together = [group.partners for group in self._dependent if {one, other} <= group.axes]
            pairs = product(first, second)
            found |= {pair_number(i, j) for i, j in pairs if all(partners[i] >> j & 1 for partners in together)}
        return frozenset(found)

    @cached_property
    def _dependent(self) -> list[_Group]:
        return [self._group(witnesses) for witnesses in self._witnesses()]

    def _group(self, witnesses: set[Witness]) -> _Group:
        axes: set[str] = set()
        partners: dict[int, int] = {}
        for witness in witnesses:
            axes.update(axis for axis, _ in witness)
            levels = {self.numbers[axis][level] for axis, on_it in witness for level in on_it}
            together = sum(1 << level for level in levels)
            for level in levels:
                partners[level] = partners.get(level, 0) | together
        return _Group(axes, partners)

    def _levels_of_row(self, row: Row | tuple[str, str]) -> tuple[int, ...]:
        return tuple(numbers[level] for of, numbers in self._rows for level in of(row))
