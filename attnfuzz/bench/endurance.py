"""What a kernel that crashes, one that hangs and one that leaks cost the kernels that are searched beside them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from attnfuzz.bench.campaigns import Measured, measure_campaign
from attnfuzz.campaign.reporter import SilentReporter
from attnfuzz.campaign.result import Statistics

__all__ = ["HOSTILE", "Endurance", "MemorySample", "measure_endurance", "resident_bytes_of_tree"]

HOSTILE = tuple(f"attnfuzz.bench.hostile_kernels:{name}" for name in ("crashes_on_5_percent", "hangs", "leaks"))
_SHARE_ALONE = 1 / 5
"""Of the time, before and once more after: what drifts meanwhile on the machine shows in both. Kernels take turns of
seconds and differ in speed, so that a rate over a few turns says little."""
_SAMPLE_EVERY_S = 5.0
_WARMUP_S = 10.0


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Resident memory of all processes of the campaign together, ``seconds`` after it began."""

    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Endurance:
    """``alone``: the healthy kernels by themselves, before and after. ``together``: with the hostile ones."""

    targets: tuple[str, ...]
    alone: tuple[Measured, Measured]
    together: Measured
    memory: tuple[MemorySample, ...]

    @property
    def rate_kept(self) -> float:
        """Throughput of the healthy kernels beside the hostile ones, over that without them."""
        alone = sum(one.rate_of(self.targets) for one in self.alone) / len(self.alone)
        return self.together.rate_of(self.targets) / alone if alone else 0.0

    @property
    def found(self) -> dict[str, list[str]]:
        """What was found on each hostile kernel, by its name: oracle and kind."""
        findings = self.together.result.findings
        return {
            target.rpartition(":")[2]: [
                f"{one.failure.oracle}/{one.failure.kind}" for one in findings if one.declaration.target == target
            ]
            for target in HOSTILE
        }


def measure_endurance(
    kernels: Sequence[str], *, seconds: float, workers: int | None = None, device: str = "auto", seed: int = 0
) -> Endurance:
    """Take about ``seconds`` in all."""
    alone_s = max(1.0, seconds * _SHARE_ALONE - _WARMUP_S)
    measure = partial(measure_campaign, warmup_s=_WARMUP_S, workers=workers, device=device)
    before = measure(kernels, seconds=alone_s, seed=seed)
    memory = _Memory()
    together_s = max(1.0, seconds - 2 * (alone_s + _WARMUP_S) - _WARMUP_S)
    together = measure((*kernels, *HOSTILE), seconds=together_s, seed=seed + 1, watch=memory)
    after = measure(kernels, seconds=alone_s, seed=seed + 2)
    return Endurance(tuple(before.cases), (before, after), together, tuple(memory.samples))


class _Memory(SilentReporter):
    """Samples the memory of the process tree while a campaign runs."""

    def __init__(self) -> None:
        self.samples: list[MemorySample] = []
        self._began = self._next = time.monotonic()

    def progress(self, statistics: Statistics) -> None:
        del statistics
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SAMPLE_EVERY_S
            self.samples.append(MemorySample(now - self._began, resident_bytes_of_tree(os.getpid())))


def resident_bytes_of_tree(root: int, proc: Path = Path("/proc")) -> int:
    """Proportional resident memory of process ``root`` and all its descendants: shared pages count once."""
    parents = {
        pid: parent for path in proc.glob("[0-9]*") if (parent := _parent(path)) is not None for pid in [int(path.name)]
    }
    tree, grown = {root}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in tree} - tree
        tree |= more
        grown = bool(more)
    return sum(_resident_bytes(proc / str(pid)) for pid in tree)


def _parent(path: Path) -> int | None:
    try:
        return int((path / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # it has ended meanwhile
        return None


def _resident_bytes(path: Path) -> int:
    try:
        lines = (path / "smaps_rollup").read_text().splitlines()
    except OSError:  # as above
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
