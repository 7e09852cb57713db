"""The state of a campaign as it runs, and what it amounts to at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from attnfuzz.campaign.earlier import Earlier
from attnfuzz.campaign.elsewhere import FoundElsewhere
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.inference import Inferred
from attnfuzz.campaign.messages import Progress
from attnfuzz.campaign.ratios import EXACT, NOT_FINITE
from attnfuzz.campaign.throughput import Throughput
from attnfuzz.declaration import Declaration
from attnfuzz.isolation.pythons import Python

__all__ = ["CampaignResult", "Count", "KernelStatistics", "Seconds", "Standing", "Statistics", "StopReason"]

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e10)]
"""These rules hold where statistics are read from a file: a time of all workers together is three centuries at most."""

_Key = TypeVar("_Key", int, str)
_Bin = Annotated[int, msgspec.Meta(ge=EXACT, le=NOT_FINITE)]

StopReason = Literal["budget", "interrupted", "fail_fast", "workers_lost", "environment"]
Standing = Literal["counts", "known", "outside"]
"""Of a finding: one that makes the command fail, one that an earlier campaign told, one that a declaration ends."""

_SUMS = ("cases", "seconds", "known", "skipped", "compile_s", "kernel_s", "reference_s", "build_s", "restarts")


@dataclass(slots=True)
class KernelStatistics:
    """What was done on one kernel; the fields are sums (``max_error_ratio``: the largest) of those of ``Progress``.

    ``known``: failures that findings explained; ``skipped``: cases not run for that; ``not_runnable``: cases, which are
    not among the ``cases``, by why they cannot run here.
    """

    declaration: Declaration
    cases: Count = 0
    seconds: Seconds = 0.0
    known: Count = 0
    skipped: Count = 0
    max_error_ratio: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    compile_s: Seconds = 0.0
    kernel_s: Seconds = 0.0
    reference_s: Seconds = 0.0
    build_s: Seconds = 0.0
    restarts: Count = 0
    ratios: dict[str, dict[_Bin, Count]] = field(default_factory=dict)
    coverage: dict[Count, Count] = field(default_factory=dict)
    not_runnable: dict[str, Count] = field(default_factory=dict)

    def add(self, progress: Progress | KernelStatistics) -> None:
        """Add what a worker reported, or what was done on the kernel in another campaign."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(progress, name))
        self.max_error_ratio = max(self.max_error_ratio, progress.max_error_ratio)
        for dtype, counts in progress.ratios.items():
            _add_counts(self.ratios.setdefault(dtype, {}), counts)
        _add_counts(self.coverage, progress.coverage)
        _add_counts(self.not_runnable, progress.not_runnable)


@dataclass(slots=True)
class Statistics:
    """Everything about a campaign that changes while it runs. Times are on the monotonic clock.

    ``why_so_many``: what the number of workers was chosen by; empty if it was asked for. ``deadline`` allows for
    start-up until ``begin``, from when ``budget_s`` are left. ``pedantic``: all that is not declared away is the
    contract. ``against``: what an earlier campaign told, where only what is new counts. ``python``: where kernels run,
    if not in the driver's environment.
    """

    kernels: dict[str, KernelStatistics]
    started: float
    deadline: float
    device: str
    device_name: str
    workers: int
    seed: int
    why_so_many: str = ""
    budget_s: float = math.inf
    pedantic: bool = False
    against: Earlier | None = None
    python: Python | None = None
    findings: list[Finding] = field(default_factory=list)
    throughput: Throughput = field(default_factory=Throughput)

    @classmethod
    def of_kernels(cls, declarations: Sequence[Declaration]) -> dict[str, KernelStatistics]:
        """Empty statistics by target."""
        return {declaration.target: KernelStatistics(declaration) for declaration in declarations}

    def add(self, progress: Progress) -> None:
        """Add what a worker reported just now."""
        self.kernels[progress.kernel].add(progress)
        self.throughput.add(progress.device, self.elapsed_s(), progress.cases)

    def standing(self, found: Finding | FoundElsewhere) -> Standing:
        """What ``found`` amounts to: headlines and exit status are about what counts."""
        if not self.in_contract(found):
            return "outside"
        return "known" if self.is_known(found) else "counts"

    def in_contract(self, found: Finding | FoundElsewhere) -> bool:
        """Whether ``found`` is a bug by what the kernels of this campaign are held to."""
        return self.pedantic or found.in_contract

    def is_known(self, found: Finding | FoundElsewhere) -> bool:
        """Whether the earlier campaign told it."""
        return self.against is not None and self.against.knows(found)

    def share_compiling(self) -> float:
        """Part of the time of all workers that went into compiling kernels."""
        seconds = sum(kernel.seconds for kernel in self.kernels.values())
        return sum(kernel.compile_s for kernel in self.kernels.values()) / seconds if seconds else 0.0

    @property
    def restarts(self) -> int:
        """Executors that a case has cost."""
        return sum(kernel.restarts for kernel in self.kernels.values())

    @property
    def cases(self) -> int:
        """Cases judged."""
        return sum(kernel.cases for kernel in self.kernels.values())

    def begin(self) -> None:
        """Cases can be judged from now on, if not before: nothing may postpone the end any more."""
        self.deadline = min(self.deadline, time.monotonic() + self.budget_s)

    def elapsed_s(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self.started

    def remaining_s(self) -> float:
        """Seconds of the budget that are left."""
        return max(0.0, min(self.budget_s, self.deadline - time.monotonic()))


@dataclass(frozen=True, slots=True)
class CampaignResult:
    """What a campaign found. ``troubles`` are errors of the framework.

    ``unconfirmed`` failures never came back and may have been the machine's doing: too slow, or out of memory.

    ``inferred`` is what probes found out of kernels whose declarations leave something open; of these, ``limited`` were
    searched in a contract that leaves something out. ``signal`` is the number of the one that interrupted it.
    ``elsewhere`` are bugs that only other machines found. ``pythons`` are the environments among which the budget was
    shared out, if there were several, ``devices`` the names of theirs, ``missed`` the targets of kernels that were not
    reached in one of them.
    ``unbuilt``: by target, how far kernels had come that compile themselves and were not built to the end.
    """

    stop_reason: StopReason
    elapsed_s: float
    statistics: Statistics
    findings: tuple[Finding, ...]
    unconfirmed: tuple[Finding, ...] = ()
    troubles: tuple[str, ...] = ()
    signal: int | None = None
    elsewhere: tuple[FoundElsewhere, ...] = ()
    inferred: tuple[Inferred, ...] = ()
    pythons: tuple[Python, ...] = ()
    devices: Mapping[Path, str] = field(default_factory=dict)
    missed: frozenset[str] = frozenset()
    unbuilt: Mapping[str, str] = field(default_factory=dict)

    @property
    def unreached(self) -> tuple[str, ...]:
        """Targets of the kernels that no case was judged on, in one environment at least: nothing is known of them."""
        found = {finding.declaration.target for finding in self.findings}
        reached = {target for target, kernel in self.statistics.kernels.items() if kernel.cases or target in found}
        return tuple(target for target in self.statistics.kernels if target not in reached or target in self.missed)

    @property
    def limited(self) -> tuple[Inferred, ...]:
        """What was inferred of kernels that do not take all that their declarations leave open."""
        return tuple(one for one in self.inferred if one.left_out)

    @property
    def fails(self) -> bool:
        """Whether anything was found that counts; a bug is a bug, whoever found it."""
        found: tuple[Finding | FoundElsewhere, ...] = (*self.findings, *self.elsewhere)
        return any(self.statistics.standing(one) == "counts" for one in found)

    def findings_of(self, target: str) -> list[Finding]:
        """The findings of one kernel."""
        return [finding for finding in self.findings if finding.declaration.target == target]


def _add_counts(to: dict[_Key, int], counts: dict[_Key, int]) -> None:
    for key, count in counts.items():
        to[key] = to.get(key, 0) + count
