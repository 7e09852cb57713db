"""Which levels of a kernel's input space, and which pairs of them, cases have had, and how often."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.problems.input_space import InputSpace, Placement, pair_number
from attnfuzz.problems.witnesses import LONGEST

__all__ = ["Coverage", "Level", "PairCounts", "coverage_of"]

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

    def add(self, placement: Placement) -> None:
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


@dataclass(frozen=True, slots=True)
class Coverage:
    """``counts``: cases by ``pair_number``. Levels that no supported case has, and axes with only one, are left out."""

    space: InputSpace
    counts: dict[int, int]

    @property
    def possible(self) -> int:
        """Pairs that some supported case has."""
        return len(self.space.possible)

    @property
    def covered(self) -> int:
        """Those of them that some case has had."""
        return sum(pair in self.counts for pair in self.space.possible)

    @property
    def share(self) -> float:
        """Part of the possible pairs that has been covered; 1 where there is none."""
        return self.covered / self.possible if self.possible else 1.0

    def axes(self) -> dict[str, tuple[str, ...]]:
        """The levels of each axis that there is a choice on."""
        reachable = self.space.reachable
        return {
            axis: tuple(level for level, number in numbers.items() if number in reachable[axis])
            for axis, numbers in self.space.numbers.items()
            if len(reachable[axis]) > 1
        }

    def cases(self, one: Level, other: Level) -> int | None:
        """Cases with both levels, the first axis first; None if no supported case has them."""
        pair = pair_number(self._number(one), self._number(other))
        return self.counts.get(pair, 0) if pair in self.space.possible else None

    def cases_on(self, level: Level) -> int:
        """Cases with one level."""
        number = self._number(level)
        return self.counts.get(pair_number(number, number), 0)

    def holes(self) -> Iterator[tuple[Level, Level]]:
        """Possible pairs that no case had, in the order of the axes."""
        levels = [(axis, level) for axis, numbers in self.space.numbers.items() for level in numbers]
        for i, one in enumerate(levels):
            for j in range(i + 1, len(levels)):
                pair = pair_number(i, j)
                if pair in self.space.possible and pair not in self.counts:
                    yield one, levels[j]

    def _number(self, level: Level) -> int:
        axis, name = level
        return self.space.numbers[axis][name]


def coverage_of(declaration: Declaration, counts: dict[int, int], *, device: str) -> Coverage:
    """The coverage of a kernel on ``device`` ("cpu" or "cuda"), which says how long sequences are.

    What is possible takes up to half a second to find out, and is remembered.
    """
    return Coverage(_space(msgspec.json.encode(declaration), LONGEST[device]), counts)


@lru_cache(maxsize=256)
def _space(encoded: bytes, longest: int) -> InputSpace:
    """The declaration is passed as JSON since options need not be hashable, and since 1 equals True."""
    declaration = msgspec.json.decode(encoded, type=Declaration)
    return InputSpace(declaration.problem, declaration.supports, declaration.options, longest=longest)
