"""Rows that say the same, in one line."""

from __future__ import annotations

from collections.abc import Mapping

from attnfuzz.explaining.row import Reading
from attnfuzz.explaining.words import row_name, scope
from attnfuzz.problems.cases import Case

__all__ = ["summarise"]

_MOST_GROUPS = 3


def summarise(case: Case, readings: Mapping[int, Reading], *, count: int) -> list[str]:
    """What is wrong with `readings` (by row), of `count` rows in all: first what many have in common, then examples."""
    lines: list[str] = []
    clear = {row: reading for row, reading in readings.items() if not reading.vague}
    left = clear or dict(readings)
    unclear = len(readings) - len(left)
    while left and len(lines) < 2 * _MOST_GROUPS:
        statement, rows = _largest_group(left)
        example = min(rows)
        if statement is None or len(rows) == 1:
            only = "" if count == 1 else f"{row_name(case, example)}: "
            lines.append(f"{only}{left[example].exact}")
            rows = [example]
        else:
            where = scope(case, rows, count=count)
            lines.append(f"{where}: {statement}")
            if left[example].exact != statement:
                lines.append(f"{row_name(case, example)}: {left[example].exact}")
        for row in rows:
            del left[row]
    if others := len(left) + unclear:
        lines.append(f"and {others} other row{'s' if others > 1 else ''}")
    return lines


def _largest_group(readings: Mapping[int, Reading]) -> tuple[str | None, list[int]]:
    """The statement that holds for the most rows; of those with as many, the one that is most telling."""
    holds: dict[str, list[int]] = {}
    rank: dict[str, int] = {}
    for row, reading in readings.items():
        for place, statement in enumerate(reading.general):
            if row not in holds.setdefault(statement, []):
                holds[statement].append(row)
            rank[statement] = max(rank.get(statement, 0), place)
    if not holds:
        return None, [min(readings)]
    best = min(holds, key=lambda statement: (-len(holds[statement]), rank[statement]))
    return best, holds[best]
