"""When a campaign asks for relations that cost as much as hundreds of cases: in a share of each kernel's time.

By chance, as others are drawn, those of a kernel that judges 30,000 cases a minute would take most of that minute, and
a slow kernel would hardly meet any. So no case of a batch draws one, unless no other relation was asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from attnfuzz.oracles.registry import OracleName, oracle_of
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.verdict import Drawn, Relations

_SHARES = ((1, 0.3), (3, 0.1))
"""Shares of a kernel's time, until so many rounds of turns are over: a kernel that is searched for seconds has one."""
_SHARE = 0.05
_FIRST_AFTER_S = 3.0
"""Seconds of all workers with a kernel before its first turn: by then ordinary cases of its first formats have run."""
_EXPECTED_S = 0.25
"""Seconds of a relation's first turn, besides compiling: 0.1 s on an H200 alone, 0.4 to 0.9 s on a GPU that many share.
With what it compiles: of kernels that compile for seconds workers would else all have begun with one at once."""
_SMALL_BYTES = 1 << 20
"""Of a case's tensors. Larger ones leave no room for what several relations add, and show no more."""


@dataclass(slots=True)
class _Spent:
    """On one kernel: its ``usual_s`` on all else, of which ``num_compiled`` cases took compilers ``compiled_s``, and
    what its turns took, one after the other."""

    usual_s: float = 0.0
    compiled_s: float = 0.0
    num_compiled: int = 0
    turns_s: list[float] = field(default_factory=list)
    passed: Case | None = None

    def expected_s(self, num_costly: int, compilations: int) -> float:
        """How long the next turn takes: as long as the last one of the same relation, among ``num_costly``."""
        if len(self.turns_s) >= num_costly:
            return self.turns_s[-num_costly]
        return _EXPECTED_S + compilations * self.compiled_s / max(1, self.num_compiled)


class Due(NamedTuple):
    """The ``turn`` that is to be taken on ``case``, see `Drawn`."""

    case: Case
    turn: int


class CostlyRelations:
    """Says whose turn it is, and on which case; nobody's where none of ``oracles`` is costly on ``device``, or all
    relations among them are.

    Of the workers of a campaign each begins with another turn, and at another time: ``worker`` of ``num_workers``.
    """

    def __init__(self, oracles: Iterable[OracleName], *, device: str, worker: int = 0, num_workers: int = 1) -> None:
        relations = [name for name in oracles if oracle_of(name).is_relation]
        costly = tuple(name for name in relations if device in oracle_of(name).costly_on)
        if len(costly) == len(relations):
            costly = ()  # somebody who asks for these alone gives them the time
        self._compilations = sorted(oracle_of(name).compilations for name in costly)
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
        # of a case of a user's problem only a process that has imported that knows the size
        if passed and (spent.passed is None or isinstance(case, OpenCase) or tensor_nbytes(case) <= _SMALL_BYTES):
            spent.passed = case

    def due(self, target: str) -> Due | None:
        """The turn that is due now, if any."""
        spent, num_costly = self._spent[target], len(self._compilations)
        if not num_costly or spent.passed is None or spent.usual_s * self._num_workers < _FIRST_AFTER_S:
            return None
        turn = self._worker + len(spent.turns_s)
        all_turns = self._worker + self._num_workers * len(spent.turns_s)  # if the others have taken as many
        share = next((share for rounds, share in _SHARES if all_turns < rounds * num_costly), _SHARE)
        expected_s = spent.expected_s(num_costly, self._compilations[turn % num_costly])
        if sum(spent.turns_s) + self._head_start * expected_s > share * spent.usual_s:
            return None
        case, spent.passed = spent.passed, None
        return Due(case, turn)

    def taken(self, target: str, seconds: float) -> None:
        """The turn took so long."""
        self._spent[target].turns_s.append(seconds)
