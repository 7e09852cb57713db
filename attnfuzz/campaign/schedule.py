"""Which kernel a worker turns to next: every kernel gets the same time, and all of them get some of it early.

Only a kernel that is known to take its process down gets half of that: much of its time goes into starting processes,
and until it is repaired there is little more to be learned of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Schedule"]

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
