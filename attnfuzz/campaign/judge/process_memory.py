"""Remembers which cases have run in the executor's process, and the memory that it takes.

A kernel that leaks ends its process at the memory limit, which costs the cases that were running and tells nothing of
the cause. So the executor is watched between cases: half way to the limit the kernel that grew it most is suspected of
leaking, and once that is proven, executors are replaced before the limit for as long as the kernel is searched.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from attnfuzz.corpus import MAX_PRECEDING
from attnfuzz.declaration import Declaration
from attnfuzz.identity.features import case_features
from attnfuzz.isolation.process import available_bytes
from attnfuzz.problems.cases import Case

_KEPT = 2 * MAX_PRECEDING
"""A batch is recorded as a whole, and the cases before its first one may matter too."""


class History:
    """The latest cases of each kernel that ran in one process; forgotten once another process runs one."""

    def __init__(self) -> None:
        self._process: Hashable = None
        self._cases: dict[str, deque[Case]] = {}

    def record(self, process: Hashable, declaration: Declaration, cases: Sequence[Case]) -> None:
        """Note that ``cases`` ran on a kernel in ``process``, which may have died of the last one."""
        if process != self._process:
            self._process = process
            self._cases.clear()
        self._cases.setdefault(declaration.target, deque(maxlen=_KEPT)).extend(cases)

    def of(self, declaration: Declaration) -> tuple[Case, ...]:
        """Every case of the kernel that is remembered, oldest first."""
        return tuple(self._cases.get(declaration.target, ()))

    def before(self, declaration: Declaration, case: Case) -> tuple[Case, ...]:
        """The cases that ran before the latest run of ``case``, oldest first; at most ``MAX_PRECEDING``.

        Empty if it did not run in this process.
        """
        cases = list(self._cases.get(declaration.target, ()))
        while cases:
            if cases.pop() == case:
                return tuple(cases[-MAX_PRECEDING:])
        return ()


_HEADROOM = {"cpu": 1 << 30, "cuda": 4 << 30}
"""For what cases need, by device: a hundred times the largest that is drawn on the CPU; on a GPU, references of large
cases are computed there. Of what a kernel leaks, it is as much as fills up within a few hundred cases."""
_LEAST_HEADROOM = 256 << 20
_SHARE = 0.8
"""Share of the machine's free memory; the rest is for the workers and for others."""


def memory_limit(resident_bytes: int, *, device: str, workers: int, available: int | None = None) -> int:
    """The limit in bytes for each of ``workers`` executors that begin with ``resident_bytes``, kernels imported.

    ``available`` is the memory that is free on this machine, found out if None.
    """
    headroom = _HEADROOM[device]
    available = available_bytes() if available is None else available
    if available is not None:
        headroom = min(headroom, int(_SHARE * available / max(1, workers)) - resident_bytes)
    return resident_bytes + max(_LEAST_HEADROOM, headroom)


_TOO_FULL = 0.5
_MOST_TO_FILL = 0.8
"""Share of the room that is left which a batch of a kernel that leaks may be expected to take."""
_CASES_WORTH_A_PROCESS = 256
"""After so many, replacing a process costs little, whatever has made it grow."""
_MAX_CHECKS = 4
"""Most checks of a kernel that turns out not to leak, each on another case: it may leak on some only."""
_PLACES = (0.0, 0.5, 1.0, 0.25)
"""Places of the cases that are checked one after the other among those that ran while memory grew, richest first."""
_LOOKS_KEPT = 7
_GPU_SHARE = 0.1
"""Share of a GPU's memory to which executors are limited (see `attnfuzz.judging.service`)."""
_USABLE_GPU_SHARE = 0.8
"""Usable share of that: CUDA itself needs half a gigabyte for a process, which is not counted anywhere."""


@dataclass(slots=True)
class _Process:
    """The present executor. ``share`` is how much of its room it has taken."""

    key: Hashable
    began_with: int
    share: float = 0.0
    cases: Counter[str] = field(default_factory=Counter)
    grown: dict[str, float] = field(default_factory=dict)

    def note(self, target: str, cases: int, share: float) -> float:
        """Note that it has ``share`` after ``cases`` of a kernel; what each added."""
        added = share - self.share
        self.share = share
        self.cases[target] += cases
        self.grown[target] = self.grown.get(target, 0.0) + added
        return added / cases

    def mean_growth(self, target: str) -> float:
        """Bytes that each case of a kernel has added so far."""
        return self.grown[target] / self.cases[target]


class MemoryWatch:
    """Watches one executor after the other, each with ``limit_bytes`` of memory (None: no limit).

    ``sharing_gpu``: how many processes use its GPU. Where they are more than it has room for at their limits, each has
    to be content with its part: those of a kernel that leaks would fill it up together, and others fail for it.
    """

    def __init__(self, limit_bytes: int | None, *, sharing_gpu: int = 1) -> None:
        self._limit_bytes = limit_bytes
        self._crowding = max(1.0, sharing_gpu * _GPU_SHARE / _USABLE_GPU_SHARE)
        self._process: _Process | None = None
        self._ran_while_growing: dict[str, tuple[Declaration, Sequence[Case]]] = {}
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
            return  # it took the place of one that died
        if not memory_bytes:  # it has died: what it had is gone, and that is no sign of a kernel that shrinks
            self._process = None
            return
        room = 0 if self._limit_bytes is None else self._limit_bytes - now.began_with
        of_room = (memory_bytes - now.began_with) / room if room > 0 else 0.0
        share = max(of_room, self._crowding * gpu_share)
        growth = now.note(target, len(cases), share)
        self._per_case.setdefault(target, deque(maxlen=_LOOKS_KEPT)).append(growth)
        if target not in self._ran_while_growing or 0.0 < growth >= now.mean_growth(target):
            self._ran_while_growing[target] = declaration, cases
        if share >= _TOO_FULL and self._suspect is None:
            most = max(now.grown, key=lambda one: now.grown[one])
            if most not in self._leaking and self._innocent[most] < _MAX_CHECKS:
                self._suspect = most

    @property
    def suspect(self) -> tuple[Declaration, Case] | None:
        """A kernel to be looked at for leaks, and a case that it may leak on."""
        if self._suspect is None:
            return None
        declaration, cases = self._ran_while_growing[self._suspect]
        richest_first = sorted(cases, key=lambda case: -len(case_features(declaration, case)))
        place = _PLACES[self._innocent[self._suspect]]
        return declaration, richest_first[round(place * (len(cases) - 1))]

    def checked(self, declaration: Declaration, *, leaks: bool) -> None:
        """Note what came of looking at the suspect."""
        target = declaration.target
        if leaks:
            self.leaks(target)
        else:
            self._innocent[target] += 1
        if self._suspect == target:
            self._suspect = None

    def leaks(self, target: str) -> None:
        """Note that a kernel leaks, as has been found here or elsewhere."""
        self._leaking.add(target)
        if self._suspect == target:
            self._suspect = None

    def wants_fresh(self, declaration: Declaration) -> bool:
        """Whether to replace the executor before it runs a case of the kernel."""
        now = self._process
        if now is None or not now.cases:
            return False
        if declaration.target in self._leaking and self._batch_size(declaration, 1.0 - now.share) <= 0:
            return True
        if now.share < _TOO_FULL:
            return False
        return not self._leaking.isdisjoint(now.grown) or now.cases.total() >= _CASES_WORTH_A_PROCESS

    def batches(self, declaration: Declaration, cases: Sequence[Case]) -> list[Sequence[Case]]:
        """``cases`` in parts that a fresh executor has room for: one part, unless the kernel leaks."""
        if declaration.target not in self._leaking:
            return [cases]
        size = max(1, self._batch_size(declaration, 1.0 - _TOO_FULL))
        return [cases[start : start + size] for start in range(0, len(cases), size)]

    def _batch_size(self, declaration: Declaration, room: float) -> int:
        """How many cases of a kernel fit into ``room``; as many as one likes if it does not grow."""
        growths = sorted(self._per_case.get(declaration.target, (0.0,)))
        usual = growths[: max(1, len(growths) - 1)]  # without the largest: a process that is new grows once
        growth = sum(usual) / len(usual)
        return int(_MOST_TO_FILL * room / growth) if growth > 0 else 1 << 30
