"""What a kernel that crashes, one that hangs and one that leaks cost the kernels that are searched beside them.

Two campaigns run at the same time, each with half of the workers: the healthy kernels by themselves, and the same with
the hostile ones. Whatever else the machine does meanwhile slows down both.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from attnfuzz import safe_start
from attnfuzz.bench.throughput import MeasuredCampaign, measure_campaign
from attnfuzz.campaign.result import Reporter, Statistics
from attnfuzz.campaign.workers import cores

__all__ = ["HOSTILE", "Endurance", "EnduranceSummary", "MemorySample", "measure_endurance", "resident_bytes_of_tree"]

HOSTILE = tuple(f"attnfuzz.bench.hostile_kernels:{name}" for name in ("crashes_on_5_percent", "hangs", "leaks"))
_FOUND = 1
"""A campaign's exit status if a kernel failed."""
_SAMPLE_EVERY_S = 5.0
_WARMUP_S = 10.0


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Resident memory of all processes of the campaign together, ``seconds`` after it began."""

    seconds: float
    nbytes: int


class _Found(msgspec.Struct):
    in_contract: bool


class _OfKernel(msgspec.Struct):
    name: str
    cases: int
    findings: list[_Found]


class EnduranceSummary(msgspec.Struct):
    """What the benchmark reads of a campaign's ``--json``: its length and the cases of each kernel."""

    elapsed_s: float
    kernels: list[_OfKernel]

    @property
    def rate(self) -> float:
        """Cases a second."""
        return sum(one.cases for one in self.kernels) / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Endurance:
    """``alone``: the healthy kernels by themselves. ``together``: with the hostile ones, meanwhile."""

    targets: tuple[str, ...]
    alone: EnduranceSummary
    together: MeasuredCampaign
    memory: tuple[MemorySample, ...]

    @property
    def rate_kept(self) -> float:
        """Throughput of the healthy kernels beside the hostile ones, over that without them."""
        return self.together.rate_of(self.targets) / self.alone.rate if self.alone.rate else 0.0

    @property
    def strays(self) -> list[str]:
        """What was found on healthy kernels: name, oracle and what it says."""
        beside = [
            f"{one.declaration.name}: {one.failure.name}: {one.failure.message}"
            for one in self.together.result.findings
            if one.declaration.target not in HOSTILE and one.in_contract
        ]
        counted = {one.name: sum(found.in_contract for found in one.findings) for one in self.alone.kernels}
        alone = [f"{name}: {number} without the hostile ones" for name, number in counted.items() if number]
        return beside + alone

    @property
    def found(self) -> dict[str, list[str]]:
        """What was found on each hostile kernel, by its name: oracle and kind."""
        findings = self.together.result.findings
        return {
            target.rpartition(":")[2]: [one.failure.name for one in findings if one.declaration.target == target]
            for target in HOSTILE
        }


def measure_endurance(
    kernels: Sequence[str], *, seconds: float, workers: int | None = None, device: str = "auto", seed: int = 0
) -> Endurance:
    """Take about ``seconds``. ``workers``: of both campaigns together, two at least; by default one for each core.

    Raises RuntimeError if the campaign on the healthy kernels could not run.
    """
    each = max(1, (workers or cores()) // 2)
    with tempfile.TemporaryDirectory(prefix="attnfuzz-endurance-") as name:
        folder = Path(name)
        command = safe_start.command("attnfuzz", "explore", *kernels, "--quiet", "--budget", f"{seconds:.0f}s")
        command += [
            "--workers",
            str(each),
            "--device",
            device,
            "--seed",
            str(seed),
            "--save-dir",
            str(folder / "found"),
        ]
        command += ["--json", str(folder / "alone.json")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as alone:
            memory = _Memory(but_for=alone.pid)
            together = measure_campaign(
                (*kernels, *HOSTILE),
                seconds=max(1.0, seconds - _WARMUP_S),
                warmup_s=_WARMUP_S,
                workers=each,
                device=device,
                seed=seed + 1,
                watch=memory,
            )
            said, _ = alone.communicate()
        if alone.returncode not in (0, _FOUND):
            raise RuntimeError(f"the campaign on the healthy kernels ended with status {alone.returncode}:\n{said}")
        summary = msgspec.json.decode((folder / "alone.json").read_bytes(), type=EnduranceSummary)
    return Endurance(tuple(kernels), summary, together, tuple(memory.samples))


class _Memory(Reporter):
    """Samples the memory of the process tree while a campaign runs."""

    def __init__(self, *, but_for: int) -> None:
        self._but_for = but_for
        self.samples: list[MemorySample] = []
        self._began = self._next = time.monotonic()

    def progress(self, statistics: Statistics) -> None:
        del statistics
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SAMPLE_EVERY_S
            self.samples.append(
                MemorySample(now - self._began, resident_bytes_of_tree(os.getpid(), but_for=self._but_for))
            )


def resident_bytes_of_tree(root: int, proc: Path = Path("/proc"), *, but_for: int | None = None) -> int:
    """Proportional resident memory of process ``root`` and its descendants, but for the branch from ``but_for`` on.

    Shared pages count once.
    """
    parents = {
        pid: parent for path in proc.glob("[0-9]*") if (parent := _parent(path)) is not None for pid in [int(path.name)]
    }
    tree, grown = {root}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in tree and pid != but_for} - tree
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
