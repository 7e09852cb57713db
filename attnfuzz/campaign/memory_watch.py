"""The memory of a worker's executor: which kernel makes it grow, and when a fresh one had better take its place.

A kernel that leaks ends its process at the memory limit, which costs the cases that were running and tells nothing of
the cause. So the executor is watched between cases: half way to the limit the kernel that grew it most is suspected of
leaking, and once that is proven, executors are replaced before the limit for as long as the kernel is searched.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case

__all__ = ["MemoryWatch"]

_TOO_FULL = 0.5
_MOST_TO_FILL = 0.8
"""Of the room that is left: how much a batch of a kernel that leaks may be expected to take."""
_CASES_WORTH_A_PROCESS = 256
"""After so many, replacing a process costs little, whatever has made it grow."""
_MAX_CHECKS = 2
"""Of one kernel, if it turns out not to leak."""
_LOOKS_KEPT = 7


@dataclass(slots=True)
class _Process:
    """What is known of the present executor. ``share`` is how much of its room it has taken."""

    key: Hashable
    began_with: int
    share: float = 0.0
    cases: int = 0
    grown: dict[str, float] = field(default_factory=dict)


class MemoryWatch:
    """Watches one executor after the other, each with ``limit_bytes`` of memory (None: no limit)."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._process: _Process | None = None
        self._latest: dict[str, tuple[Declaration, Case]] = {}
        self._per_case: dict[str, deque[float]] = {}
        self._innocent: Counter[str] = Counter()
        self._leaking: set[str] = set()
        self._suspect: str | None = None

    def look_before(self, process: Hashable, memory_bytes: int) -> None:
        """Note what an executor has before it runs anything."""
        if self._process is None or self._process.key != process:
            self._process = _Process(process, memory_bytes)

    def look_after(
        self, process: Hashable, declaration: Declaration, cases: Sequence[Case], *, memory_bytes: int, gpu_share: float
    ) -> None:
        """Note what it has after ``cases``; ``gpu_share`` is the part of its GPU memory that is taken."""
        now, target = self._process, declaration.target
        if now is None or now.key != process:
            return  # it has died, which says enough
        share = max(self._share(now, memory_bytes), gpu_share)
        now.grown[target] = now.grown.get(target, 0.0) + share - now.share
        self._per_case.setdefault(target, deque(maxlen=_LOOKS_KEPT)).append((share - now.share) / len(cases))
        now.share = share
        now.cases += len(cases)
        self._latest[target] = declaration, cases[-1]
        if share >= _TOO_FULL and self._suspect is None:
            self._accuse(max(now.grown, key=lambda one: now.grown[one]))

    @property
    def suspect(self) -> tuple[Declaration, Case] | None:
        """A kernel to be looked at for leaks, and a case that it has run."""
        return None if self._suspect is None else self._latest[self._suspect]

    def checked(self, declaration: Declaration, *, leaks: bool) -> None:
        """Note what came of looking at the suspect."""
        target = declaration.target
        if leaks:
            self._leaking.add(target)
        else:
            self._innocent[target] += 1
        if self._suspect == target:
            self._suspect = None

    def wants_fresh(self, declaration: Declaration) -> bool:
        """Whether to replace the executor before it runs a case of the kernel."""
        now = self._process
        if now is None or not now.cases:
            return False
        if declaration.target in self._leaking and self._batch_size(declaration, 1.0 - now.share) == 0:
            return True
        if now.share < _TOO_FULL:
            return False
        return not self._leaking.isdisjoint(now.grown) or now.cases >= _CASES_WORTH_A_PROCESS

    def batches(self, declaration: Declaration, cases: Sequence[Case]) -> list[Sequence[Case]]:
        """``cases`` in parts that a fresh executor has room for: one part, unless the kernel leaks."""
        if declaration.target not in self._leaking:
            return [cases]
        size = max(1, self._batch_size(declaration, 1.0 - _TOO_FULL))
        return [cases[start : start + size] for start in range(0, len(cases), size)]

    def _batch_size(self, declaration: Declaration, room: float) -> int:
        """How many cases of a kernel fit into ``room``; as many as one likes if it does not grow."""
        growth = statistics.median(self._per_case.get(declaration.target, (0.0,)))
        return int(_MOST_TO_FILL * room / growth) if growth > 0 else 1 << 30

    def _accuse(self, target: str) -> None:
        if target not in self._leaking and self._innocent[target] < _MAX_CHECKS:
            self._suspect = target

    def _share(self, now: _Process, memory_bytes: int) -> float:
        if self._limit_bytes is None or self._limit_bytes <= now.began_with:
            return 0.0
        return (memory_bytes - now.began_with) / (self._limit_bytes - now.began_with)
