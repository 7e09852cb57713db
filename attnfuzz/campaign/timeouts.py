"""How long a case may take before it counts as hanging: learned from the cases that passed."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["AdaptiveTimeout"]

_ENOUGH_CASES = 10
_SLOWER_THAN_EVER = 20.0
_LEAST_S = 2.0
_CERTAIN_S = 10.0
_SLOWER_WHEN_SHORT = 5.0
_SHORT_PART = 0.05
_BATCH_PART = 0.25


@dataclass(slots=True)
class AdaptiveTimeout:
    """The limit for one kernel: ``longest_s`` until ten cases have passed, then 20 times the slowest of them.

    A shorter limit only raises the suspicion: a hang is confirmed with ``certain_s``. The ``short`` limit is for trying
    out many smaller cases that may hang, and does not wait for ten to pass: 5 times the slowest.
    """

    longest_s: float
    passed: int = field(default=0)
    slowest_s: float = field(default=0.0)

    def limit_s(self, *, short: bool = False) -> float:
        """The limit for the next case in seconds."""
        if short:
            return self._limit_s(_SHORT_PART * self.longest_s, _SLOWER_WHEN_SHORT)
        if self.passed < _ENOUGH_CASES:
            return self.longest_s
        return self._limit_s(_LEAST_S, _SLOWER_THAN_EVER)

    def batch_limit_s(self, cases: int) -> float:
        """The limit for a batch: each of its cases may be as slow as any, and is judged alone if the batch is late."""
        return self._limit_s(_BATCH_PART * self.longest_s, _SLOWER_THAN_EVER) + (cases - 1) * self.slowest_s

    @property
    def certain_s(self) -> float:
        """What a case that hangs for certain does not end within: ``longest_s``, or less if others end much sooner."""
        return min(self.longest_s, max(_CERTAIN_S, self.limit_s()))

    def _limit_s(self, least_s: float, slower: float) -> float:
        return min(self.longest_s, max(least_s, slower * self.slowest_s))

    def record(self, seconds: float, *, cases: int = 1) -> None:
        """Learn from cases that ended by themselves, none of which took more than ``seconds``."""
        self.passed += cases
        self.slowest_s = max(self.slowest_s, seconds)
