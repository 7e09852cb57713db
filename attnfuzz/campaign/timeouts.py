"""How long a case may take before it counts as hanging: learned from the cases that passed."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["AdaptiveTimeout"]

_ENOUGH_CASES = 10
_SLOWER_THAN_EVER = 20.0


@dataclass(slots=True)
class AdaptiveTimeout:
    """The limit for one kernel: ``longest_s`` until ten cases have passed, then 20 times the slowest of them.

    A shorter limit only raises the suspicion: a hang is confirmed with ``longest_s``.
    """

    longest_s: float
    passed: int = field(default=0)
    slowest_s: float = field(default=0.0)

    def limit_s(self, *, at_least_s: float = 2.0) -> float:
        """The limit for the next case, never below ``at_least_s`` nor above ``longest_s``."""
        if self.passed < _ENOUGH_CASES:
            return self.longest_s
        return min(self.longest_s, max(at_least_s, _SLOWER_THAN_EVER * self.slowest_s))

    def record(self, seconds: float) -> None:
        """Learn from a case that ended by itself after ``seconds``."""
        self.passed += 1
        self.slowest_s = max(self.slowest_s, seconds)
