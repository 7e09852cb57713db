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
class _Seen:
    passed: int = 0
    slowest_s: float = 0.0

    def add(self, seconds: float, cases: int) -> None:
        self.passed += cases
        self.slowest_s = max(self.slowest_s, seconds)


@dataclass(slots=True)
class AdaptiveTimeout:
    """The limit for one kernel: ``longest_s`` until ten cases have passed, then 20 times the slowest of them.

    The first case of a format in a process may compile in that very process for as long as it likes, and looks like a
    loop without end meanwhile: such cases are ``first``, have the longest time until ten *of them* have passed, and
    teach nothing about the others. A shorter limit only raises the suspicion: a hang is confirmed with ``certain_s``.
    The ``short`` limit is for trying out many smaller cases that may hang, and does not wait for ten to pass: 5 times
    the slowest.
    """

    longest_s: float
    _all: _Seen = field(default_factory=_Seen)
    _first: _Seen = field(default_factory=_Seen)
    _later: _Seen = field(default_factory=_Seen)

    def limit_s(self, *, first: bool = False, short: bool = False) -> float:
        """The limit for the next case in seconds."""
        seen = self._first if first else self._later if self._later.passed >= _ENOUGH_CASES else self._all
        if short:
            return self._limit_s(_SHORT_PART * self.longest_s, _SLOWER_WHEN_SHORT * seen.slowest_s)
        if seen.passed < _ENOUGH_CASES:
            return self.longest_s
        return self._limit_s(_LEAST_S, _SLOWER_THAN_EVER * seen.slowest_s)

    def batch_limit_s(self, cases: int) -> float:
        """The limit for a batch: each of its cases may be as slow as any, and is judged alone if the batch is late."""
        slowest_s = self._all.slowest_s
        return self._limit_s(_BATCH_PART * self.longest_s, _SLOWER_THAN_EVER * slowest_s) + (cases - 1) * slowest_s

    @property
    def certain_s(self) -> float:
        """What a case that hangs for certain does not end within, in a fresh process too: ``longest_s``, or less if
        others end much sooner."""
        if self._all.passed < _ENOUGH_CASES:
            return self.longest_s
        return self._limit_s(_CERTAIN_S, _SLOWER_THAN_EVER * self._all.slowest_s)

    def _limit_s(self, least_s: float, limit_s: float) -> float:
        return min(self.longest_s, max(least_s, limit_s))

    def record(self, seconds: float, *, cases: int = 1, first: bool = False) -> None:
        """Learn from cases that ended by themselves, none of which took more than ``seconds``."""
        for seen in (self._all, self._first if first else self._later):
            seen.add(seconds, cases)
