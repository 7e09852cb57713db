"""When a campaign asks for relations that cost as much as hundreds of cases: in a share of each kernel's time.

By chance, as others are drawn, those of a kernel that judges 30,000 cases a minute would take most of that minute, and
a slow kernel would hardly meet any. So no case of a batch draws one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from attnfuzz.oracles.registry import OracleName, oracle_of
from attnfuzz.problems.cases import Case
from attnfuzz.verdict import Drawn, Relations

_SHARES = ((1, 0.3), (3, 0.1))
"""Shares of a kernel's time, until so many rounds of turns are over: a kernel that is searched for seconds has one."""
_SHARE = 0.05
_FIRST_AFTER_S = 3.0
"""Seconds of all workers with a kernel before its first turn: by then ordinary cases of its first formats have run."""
_EXPECTED_S = 0.25
"""Seconds of a turn before any has been seen: 0.1 s on an H200 alone, 0.4 to 0.9 s on a GPU that many share."""
_COMPILED = 4
"""Times that it compiles the kernel besides: wide strides do not fit into the integers of the formats that are known.
Of those that compile for seconds workers would else all have begun with one, when none of them knew what it takes."""


@dataclass(slots=True)
class _Spent:
    """On one kernel: its ``usual_s`` on all else, of which ``num_compiled`` cases took compilers ``compiled_s``, and
    what its ``turns`` took."""

    usual_s: float = 0.0
    compiled_s: float = 0.0
    num_compiled: int = 0
    costly_s: float = 0.0
    turns: int = 0
    passed: Case | None = None

    @property
    def expected_s(self) -> float:
        if self.turns:
            return self.costly_s / self.turns
        return _EXPECTED_S + _COMPILED * self.compiled_s / max(1, self.num_compiled)


class Due(NamedTuple):
    """The ``turn`` that is to be taken on ``case``, see `Drawn`."""

    case: Case
    turn: int


class CostlyRelations:
    """Says whose turn it is, and on which case; nobody's where none of ``oracles`` is costly on ``device``.

    Of the workers of a campaign each begins with another turn, and at another time: ``worker`` of ``num_workers``.
    """

    def __init__(self, oracles: Iterable[OracleName], *, device: str, worker: int = 0, num_workers: int = 1) -> None:
        costly = tuple(name for name in oracles if device in oracle_of(name).costly_on)
        self._costly = len(costly)
        self.usual: Relations = Drawn(without=costly) if costly else None
        """Relations that judge a case along with others."""
        self._worker = worker
        self._num_workers = num_workers
        self._head_start = (worker + 1) / (num_workers + 1)
        self._spent: defaultdict[str, _Spent] = defaultdict(_Spent)

    def judged(self, target: str, case: Case, seconds: float, *, compile_s: float = 0.0, passed: bool) -> None:
        """All else has said what it has to say of a case of the kernel, which took so long, and compilers of that."""
        spent = self._spent[target]
        spent.usual_s += seconds
        spent.compiled_s += compile_s
        spent.num_compiled += compile_s > 0
        spent.passed = case if passed else spent.passed

    def due(self, target: str) -> Due | None:
        """The turn that is due now, if any."""
        spent = self._spent[target]
        if not self._costly or spent.passed is None or spent.usual_s * self._num_workers < _FIRST_AFTER_S:
            return None
        all_turns = self._worker + self._num_workers * spent.turns  # if the others have taken as many
        share = next((share for rounds, share in _SHARES if all_turns < rounds * self._costly), _SHARE)
        if spent.costly_s + self._head_start * spent.expected_s > share * spent.usual_s:
            return None
        case, spent.passed = spent.passed, None
        return Due(case, self._worker + spent.turns)

    def taken(self, target: str, seconds: float) -> None:
        """The turn took so long."""
        self._spent[target].costly_s += seconds
        self._spent[target].turns += 1
