"""Whether an executor that owes an answer waits for a compiler. Torch-free.

Many kernels compile themselves when they are first called: a JIT starts ninja and nvcc for a minute, with gigabytes of
memory, behind the lock of a file, so that the other processes wait for it. None of that is the time of the case, nor
the memory of the kernel; and a process that was killed in the middle of it would begin again, for ever.

Taken for a build are: a process that the executor started in this call, whatever it does; an older one while it
computes (a pool of compilers); a file's lock that is waited for in the system; and an executor that does nothing while
another one of the same zygote has had a compiler at work for seconds. The last is how a lock looks that is polled.

A kernel *compiles itself* if one of those processes is a C++ or CUDA compiler, or what runs one, or if it waits for a
lock. Triton starts processes, too, an assembler and a C compiler for what launches its kernels; but each process that
needs their results can have them made, at once and within the time of a case.
"""

import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from attnfuzz.isolation.process import (
    TICKS_PER_S,
    ProcessSeen,
    all_processes,
    available_bytes,
    descendants,
    now_in_ticks,
    private_bytes,
    waits_for_file_lock,
)

BUILD_PATIENCE_S = 600.0
"""How long the builds of one call may take in all. From then on its time counts, whatever it waits for."""

LOOK_EVERY_S = 0.5
"""A look at all processes takes milliseconds; a call that is answered sooner is never looked at."""

_IDLE = 0.1
"""Part of a CPU below which a process is idle: one that polls a lock ten or twenty times a second takes less."""
_LONG_AT_WORK_S = 3.0
"""Assemblers that Triton starts are done sooner; what somebody else waits for is not."""
_ASSEMBLER = "ptxas"
"""What Triton starts itself; of a large kernel, beside many others, it may take longer. Others start it by nvcc."""
_COMPILERS = frozenset(
    {"c++", "cc1plus", "cicc", "clang++", "cmake", "cudafe++", "g++", "hipcc", "make", "ninja", "nvcc"}
)
"""And what runs them. torch's extensions and the engines' compilers start ninja, which starts g++ and nvcc."""
_SHARE_OF_MEMORY = 0.5
"""Share of otherwise free memory that the processes a kernel started may take. What they take in between two looks
comes on top."""


class BuildWatch:
    """Follows one call to the executor ``pid``, which began when this was made; ``look`` every ``LOOK_EVERY_S``."""

    def __init__(self, pid: int | None) -> None:
        self.seconds = 0.0
        """How long builds have taken so far."""
        self.compiles_itself = False
        """Whether any of them was more than what Triton starts."""
        self._pid = pid
        self._began_at_tick = now_in_ticks()
        self._looked_at = time.monotonic()
        self._before: Mapping[int, ProcessSeen] = {}

    def look(self) -> bool:
        """Whether a build is going on, which then has been since the last look."""
        if self._pid is None:
            return False
        now, processes = time.monotonic(), all_processes()
        is_building = self._is_building(self._pid, processes, since_s=now - self._looked_at)
        if is_building:
            self.seconds += now - self._looked_at
        self._looked_at, self._before = now, processes
        return is_building

    def takes_too_much_memory(self) -> bool:
        """Whether what the executor had started at the last look leaves the machine next to none."""
        if self._pid is None or not (started := descendants(self._before, self._pid)):
            return False
        taken, free = sum(map(private_bytes, started)), available_bytes()
        return free is not None and taken > _SHARE_OF_MEMORY * (free + taken)

    def _is_building(self, pid: int, processes: Mapping[int, ProcessSeen], *, since_s: float) -> bool:
        started = descendants(processes, pid)
        at_work = [one for one in started if processes[one].start_ticks >= self._began_at_tick]
        at_work += [one for one in started if one not in at_work and self._has_computed([one], processes)]
        waits = waits_for_file_lock(pid) or (
            self._has_idled(pid, processes, since_s) and self._others_build(pid, processes)
        )
        self.compiles_itself |= waits or any(processes[one].name in _COMPILERS for one in at_work)
        return waits or bool(at_work)

    def _has_computed(self, some: list[int], processes: Mapping[int, ProcessSeen]) -> bool:
        """Whether any of ``some`` has, since the last look."""
        return any(self._ticks_since(one, processes) for one in some)

    def _ticks_since(self, pid: int, processes: Mapping[int, ProcessSeen]) -> int:
        before, now = self._before.get(pid), processes[pid]
        return 0 if before is None or before.start_ticks != now.start_ticks else now.cpu_ticks - before.cpu_ticks

    def _has_idled(self, pid: int, processes: Mapping[int, ProcessSeen], since_s: float) -> bool:
        if pid not in self._before or pid not in processes:
            return False
        return self._ticks_since(pid, processes) <= _IDLE * since_s * TICKS_PER_S

    def _others_build(self, pid: int, processes: Mapping[int, ProcessSeen]) -> bool:
        """Whether another executor, forked from the same zygote, has a compiler that has been at work for long."""
        zygote = processes[pid].parent
        long_ago = now_in_ticks() - _LONG_AT_WORK_S * TICKS_PER_S
        executors = [one for one, seen in processes.items() if seen.parent == zygote and one != pid]
        compilers = [
            one
            for one, seen in processes.items()
            if seen.parent in executors and seen.start_ticks <= long_ago and not seen.name.startswith(_ASSEMBLER)
        ]
        return any(self._has_computed([one, *descendants(processes, one)], processes) for one in compilers)


GiveUp: TypeAlias = Callable[[BuildWatch], bool]
"""Asked at each look while a call builds, and from when it takes longer than it may: whether to wait no more."""


class OwnCompilers:
    """Gives up the builds of a kernel that compiles itself: its turn is to come later. ``seen``: whether it does.

    Two kernels that begin at once are both stopped before the first of their files is compiled.
    """

    def __init__(self) -> None:
        self.seen = False

    def __call__(self, builds: BuildWatch) -> bool:
        self.seen |= builds.compiles_itself
        return self.seen


def never(builds: BuildWatch) -> bool:
    """Wait for every build."""
    return False
