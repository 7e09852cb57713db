"""Which kernel a worker turns to next, and how many of its cases are judged together.

Every kernel gets the same time, and all of them get some of it early. Only a kernel that is known to take its process
down gets half of that: much of its time goes into starting processes, and until it is repaired there is little more to
be learned of it. Of its cases as many are judged together as time and trust allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BatchSize", "Schedule"]

_FIRST_SLICE_S = 1.0
_LATER_SLICE_S = 3.0
_PRICE_OF_FATAL = 2.0


@dataclass(slots=True)
class _Share:
    seconds: float = 0.0
    cases: int = 0
    rounds: int = 0


class Schedule:
    """Slices of time for the kernels named by ``targets``.

    Worker ``worker`` of ``num_workers`` begins with its own part of the list and goes on with the end of the part
    before it, so that together they reach each kernel soon, whoever of them is slow.
    """

    def __init__(self, targets: Sequence[str], *, worker: int = 0, num_workers: int = 1) -> None:
        first, end = ((worker + i) * len(targets) // max(1, num_workers) for i in range(2))
        others = (*targets[end:], *targets[:first])
        self._shares = {target: _Share() for target in (*targets[first:end], *reversed(others))}
        self._prices = dict[str, float]()

    def add(self, target: str) -> None:
        """A kernel joins that could not be searched before."""
        self._shares.setdefault(target, _Share())

    def next_target(self) -> str:
        """The kernel that had the least time; among those with the same, the one with fewer cases."""
        return min(self._shares, key=lambda target: (self._shares[target].seconds, self._shares[target].cases))

    def slice_s(self, target: str, remaining_s: float) -> float:
        """Seconds for the next round on ``target``: short while other kernels wait for their first.

        A round judges a case, however short it is.
        """
        if self._shares[target].rounds:
            return min(_LATER_SLICE_S, remaining_s)
        fair = remaining_s / (2 * len(self._shares))
        return min(_FIRST_SLICE_S, fair)

    def record(self, target: str, *, seconds: float, cases: int) -> None:
        """Charge a round to ``target``."""
        share = self._shares[target]
        share.seconds += self._prices.get(target, 1.0) * seconds
        share.cases += cases
        share.rounds += 1

    def charge(self, target: str, seconds: float) -> None:
        """Charge what was done about a failure of ``target`` to it."""
        self._shares[target].seconds += self._prices.get(target, 1.0) * seconds

    def is_fatal(self, target: str) -> None:
        """From now on ``target`` gets half of what others get."""
        self._prices[target] = _PRICE_OF_FATAL


_LONGEST_BATCH_S = 0.3
"""A worker looks at results and mail between batches, and a batch that dies costs as much again."""
_WEIGHT_OF_NEWEST = 0.3


@dataclass(slots=True)
class BatchSize:
    """The size for one kernel: begins at one, doubles while all goes well, and begins again when something goes wrong.

    ``most`` bounds it, and so does the time that a batch would take.
    """

    most: int
    size: int = 1
    _case_s: float = 0.0

    def went_well(self, seconds: float, cases: int) -> None:
        """Learn from ``cases`` that ended by themselves, ``seconds`` in all, compilations left out."""
        newest_s = seconds / cases
        self._case_s += (newest_s - self._case_s) * (_WEIGHT_OF_NEWEST if self._case_s else 1.0)
        fitting = int(_LONGEST_BATCH_S / self._case_s) if self._case_s else self.most
        self.size = max(1, min(2 * self.size if cases >= self.size else self.size, self.most, fitting))

    def went_wrong(self) -> None:
        """After a crash, a hang or a finding: the next case is judged alone."""
        self.size = 1
