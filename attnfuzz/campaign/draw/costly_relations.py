"""When a campaign asks for relations that cost as much as hundreds of cases: in a share of each kernel's time.

By chance, as others are drawn, those of a kernel that judges 30,000 cases a minute would take most of that minute, and
a slow kernel would hardly meet any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from attnfuzz.oracles.registry import OracleName, oracle_of
from attnfuzz.problems.cases import Case

__all__ = ["CostlyRelations"]

_SHARES = ((1, 0.3), (3, 0.15))
"""Of a kernel's time, until so many rounds of turns are over: a kernel that is searched for seconds has one."""
_SHARE = 0.05
_EXPECTED_S = 0.25
"""What one takes, before any has been seen: 0.1 s on an H200 alone, 0.4 to 0.9 s on a GPU that many share."""


@dataclass(slots=True)
class _Spent:
    """On one kernel: on its ``usual_s`` on all else, and what its ``turns`` took."""

    usual_s: float = 0.0
    costly_s: float = 0.0
    turns: int = 0
    passed: Case | None = None


class Due(NamedTuple):
    """The ``turn`` that is to be taken on ``case``, see `Drawn`."""

    case: Case
    turn: int


class CostlyRelations:
    """Says whose turn it is, and on which case; nobody's where none of ``oracles`` is costly on ``device``.

    Of the workers of a campaign each begins with another turn, and at another time: ``worker`` of ``num_workers``.
    """

    def __init__(self, oracles: Iterable[OracleName], *, device: str, worker: int = 0, num_workers: int = 1) -> None:
        self._costly = sum(device in oracle_of(name).costly_on for name in oracles)
        self._worker = worker
        self._num_workers = num_workers
        self._head_start = (worker + 1) / (num_workers + 1)
        self._spent: defaultdict[str, _Spent] = defaultdict(_Spent)

    def judged(self, target: str, case: Case, seconds: float, *, passed: bool) -> None:
        """All else has said what it has to say of a case of the kernel, which took so long."""
        spent = self._spent[target]
        spent.usual_s += seconds
        spent.passed = case if passed else spent.passed

    def due(self, target: str) -> Due | None:
        """What is to be done now, if it is time for a turn."""
        spent = self._spent[target]
        if not self._costly or spent.passed is None:
            return None
        expected_s = spent.costly_s / spent.turns if spent.turns else _EXPECTED_S
        all_turns = self._worker + self._num_workers * spent.turns  # if the others have taken as many
        share = next((share for rounds, share in _SHARES if all_turns < rounds * self._costly), _SHARE)
        if spent.costly_s + self._head_start * expected_s > share * spent.usual_s:
            return None
        case, spent.passed = spent.passed, None
        return Due(case, self._worker + spent.turns)

    def taken(self, target: str, seconds: float) -> None:
        """The turn took so long."""
        self._spent[target].costly_s += seconds
        self._spent[target].turns += 1
