"""How many workers a GPU is to have: as many as still make it faster, found by trying for a few seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from attnfuzz.declaration import Declaration
from attnfuzz.isolation.devices import Gpu
from attnfuzz.isolation.outcomes import ExecutorUnavailable, ServiceError
from attnfuzz.isolation.zygote_client import Zygote
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.problems.limits import CaseTooLarge

__all__ = ["PROBE_KERNEL", "Choice", "ProbeLoad", "by_formula", "calibrate", "cores", "levels"]

_EXECUTOR_BYTES = 3 << 29
"""Of GPU memory for one executor: about 0.6 GB of context and, most of the time, less than 1 GB of tensors."""
_MOST_PER_GPU = 32
_USUAL_PER_GPU = 16
"""Tried first where there are cores for many more: what processes that share a GPU get done in all is limited."""
_WORTH_IT = 1.10
"""How much faster more workers must be, to be taken."""
_LEAST_BUDGET_S = 100.0
_LIMIT_S = 5.0
_MEASURE_S = 0.5

PROBE_KERNEL = "attnfuzz.kernels.bundled:dense_eager"


@dataclass(frozen=True, slots=True)
class Choice:
    """Workers in all, and why so many; empty if they were asked for."""

    workers: int
    reason: str

    @property
    def sentence(self) -> str:
        """Both in one line."""
        return f"{self.workers} worker{'' if self.workers == 1 else 's'}, {self.reason}"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def by_formula(num_cores: int, gpus: Sequence[Gpu]) -> Choice:
    """One worker for each core, shared out among the GPUs, but no more on one than its memory holds."""
    if not gpus:
        return Choice(num_cores, "one for each CPU core")
    per_gpu = max(1, min(num_cores // len(gpus), _MOST_PER_GPU, *map(_held_by_memory, gpus)))
    total = per_gpu * len(gpus)
    return Choice(total, f"{per_gpu} for each GPU: by CPU cores and GPU memory")


def levels(num_cores: int, gpus: Sequence[Gpu]) -> list[int]:
    """Numbers of workers per GPU that are worth trying, ascending."""
    most = min(_MOST_PER_GPU, *map(_held_by_memory, gpus))
    share = num_cores / len(gpus)
    wanted = (*(round(share * part) for part in (0.5, 1.0, 1.5)), min(round(share), _USUAL_PER_GPU))
    return sorted({max(1, min(most, level)) for level in wanted})


def calibrate(
    num_cores: int,
    gpus: Sequence[Gpu],
    *,
    budget_s: float,
    measure: Callable[[int], float],
    clock: Callable[[], float] = time.monotonic,
) -> Choice:
    """Try more and more workers on one GPU for as long as that helps; ``measure`` tells what so many get done.

    It takes at most a twentieth of the budget; where that is too little, and without a GPU, the formula decides.
    """
    if not gpus or budget_s < _LEAST_BUDGET_S:
        return by_formula(num_cores, gpus)
    started, tried = clock(), list[tuple[int, float]]()
    for level in levels(num_cores, gpus):
        if tried and clock() - started > _LIMIT_S:
            break
        try:
            tried.append((level, measure(level)))
        except (ExecutorUnavailable, ServiceError, CaseTooLarge):  # so many do not fit, or nothing works here at all
            break
        if len(tried) > 1 and tried[-1][1] < _WORTH_IT * tried[-2][1]:
            break
    if not tried:
        return by_formula(num_cores, gpus)
    best, rate = tried[0]
    for level, faster in tried[1:]:
        if faster >= _WORTH_IT * rate:
            best, rate = level, faster
    total = best * len(gpus)
    measured = ", ".join(f"{level}: {speed / tried[0][1]:.2f}" for level, speed in tried)
    return Choice(
        total,
        f"{best} for each GPU: relative speed of {measured}, tried for {clock() - started:.1f} s",
    )


class ProbeLoad:
    """Executors that judge the same few cases again and again, pinned to one GPU by ``environment``.

    The kernel is one that needs no compilation, so that harness and GPU are measured and not the compiler.
    """

    def __init__(
        self, declaration: Declaration, zygote: Zygote, *, device: str, environment: Mapping[str, str]
    ) -> None:
        self._declaration = declaration
        self._zygote = zygote
        self._device = device
        self._environment = environment
        self._runners: list[Runner] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def measure(self, executors: int) -> float:
        """Cases a second of so many executors side by side, once all of them are warm."""
        while len(self._runners) < executors:
            runner = Runner(device=self._device, environment=self._environment, zygote=self._zygote)
            self._runners.append(self._open.enter_context(runner))
        self._all(executors, self._judge)
        until = time.monotonic() + _MEASURE_S
        counts = self._all(executors, lambda runner: self._judge_until(runner, until))
        return sum(counts) / _MEASURE_S

    def _all(self, executors: int, work: Callable[[Runner], int]) -> list[int]:
        with ThreadPoolExecutor(executors) as pool:
            return list(pool.map(work, self._runners[:executors]))

    def _judge(self, runner: Runner) -> int:
        return len(runner.judge_many(self._declaration, _CASES, timeout_s=60.0))

    def _judge_until(self, runner: Runner, until: float) -> int:
        judged = 0
        while time.monotonic() < until:
            judged += self._judge(runner)
        return judged


_CASES: Sequence[Case] = tuple(
    DenseDecodeCase(
        num_q_heads=heads, num_kv_heads=kv_heads, head_size=head_size, seq_lens=seq_lens, scale=0.125, dtype="float16"
    )
    for heads, kv_heads, head_size in ((4, 4, 64), (8, 2, 64), (8, 1, 128), (16, 8, 80))
    for seq_lens in ((1,), (40, 0, 7), (65, 300), (17,) * 8)
)


def _held_by_memory(gpu: Gpu) -> int:
    free = gpu.free_bytes if gpu.free_bytes is not None else gpu.memory_bytes
    return _MOST_PER_GPU if free is None else max(1, free // _EXECUTOR_BYTES)
