"""Which levels of a kernel's input space, and which pairs of them, cases have had, and how often.

Nothing here decides what is drawn: it is for people, who look for what was never tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from attnfuzz.declaration import Declaration
from attnfuzz.problems.input_space import CaseLevels, InputSpace, levels_of, pair_number

__all__ = ["Coverage", "Level", "PairCounts", "coverage_of", "pairs_met"]

_LANE_BYTES = 4


class PairCounts:
    """Counts the pairs of levels of placed cases, a level with itself included.

    A case has some 250 pairs, and adding up that many numbers one by one would be a fair part of what is to cost at
    most a millisecond. So the counts of one level with all others are the 32-bit lanes of a single long integer, and
    a case is added with one addition for each of its levels.
    """

    def __init__(self, num_levels: int) -> None:
        self._lanes = [1 << (8 * _LANE_BYTES * level) for level in range(num_levels)]
        self._sum_of_row = lru_cache(maxsize=1 << 12)(self._sum)
        self._with: dict[int, int] = {}

    def add(self, placement: CaseLevels) -> None:
        """Count each pair of the case's levels once; of two levels of sequences, if one sequence has both."""
        rows: dict[int, int] = {}
        for row in placement.rows:
            lanes = self._sum_of_row(row)
            for level in row:
                rows[level] = rows[level] | lanes if level in rows else lanes
        everything = self._sum(placement.case) + self._sum(rows)
        counts = self._with
        for level in placement.case:
            counts[level] = counts.get(level, 0) + everything
        for level, lanes in rows.items():
            counts[level] = counts.get(level, 0) + lanes

    def take(self) -> dict[int, int]:
        """Cases by ``pair_number`` since this was last called."""
        taken, self._with = self._with, {}
        size = _LANE_BYTES * len(self._lanes)
        return {
            pair_number(level, other): count
            for level, lanes in taken.items()
            for other, count in enumerate(memoryview(lanes.to_bytes(size, "little")).cast("I"))
            if count and other >= level
        }

    def _sum(self, levels: Iterable[int]) -> int:
        """One in the lane of each of ``levels``, which are distinct."""
        return sum(map(self._lanes.__getitem__, levels))


Level = tuple[str, str]
"""Names of an axis and of one of its levels."""


@dataclass(frozen=True)
class Coverage:
    """``counts``: cases by ``pair_number``, a level with itself included."""

    space: InputSpace
    counts: dict[int, int]

    @property
    def met(self) -> int:
        """Pairs of different levels that some case has had."""
        return pairs_met(self.counts)

    @cached_property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The levels that cases have had, by axis."""
        return self._levels(met=True)

    @property
    def unmet(self) -> dict[str, tuple[str, ...]]:
        """The levels that no case has had, be it that the kernel does not take them, by axis."""
        return self._levels(met=False)

    def cases(self, one: Level, other: Level) -> int:
        """Cases with both levels, the first axis first."""
        return self.counts.get(pair_number(self._number(one), self._number(other)), 0)

    def cases_on(self, level: Level) -> int:
        """Cases with one level."""
        return self.cases(level, level)

    def _levels(self, *, met: bool) -> dict[str, tuple[str, ...]]:
        found = {
            axis: tuple(level for level in levels if bool(self.cases_on((axis, level))) == met)
            for axis, levels in self.space.numbers.items()
        }
        return {axis: levels for axis, levels in found.items() if levels}

    def _number(self, level: Level) -> int:
        axis, name = level
        return self.space.numbers[axis][name]


def coverage_of(declaration: Declaration, counts: dict[int, int]) -> Coverage:
    """The coverage of a kernel by cases that are counted in ``counts``."""
    return Coverage(InputSpace(declaration.problem, declaration.supports, declaration.options), counts)


def pairs_met(counts: Iterable[int]) -> int:
    """How many of the numbers are of two levels; a level with itself counts cases on it."""
    return sum(first != second for first, second in map(levels_of, counts))
