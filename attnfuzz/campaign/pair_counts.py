"""How many cases had each pair of levels, counted a few hundred pairs at a time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from attnfuzz.problems.input_space import Placement, pair_number

__all__ = ["PairCounts"]

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
