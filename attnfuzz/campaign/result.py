"""The state of a campaign as it runs, and what it amounts to at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.messages import Progress
from attnfuzz.declaration import Declaration

__all__ = ["CampaignResult", "KernelStatistics", "Statistics", "StopReason"]

StopReason = Literal["budget", "interrupted", "fail_fast", "workers_lost", "environment"]


@dataclass(slots=True)
class KernelStatistics:
    """What was done on one kernel. ``known``: failures that findings explained; ``skipped``: cases not run for that."""

    declaration: Declaration
    cases: int = 0
    seconds: float = 0.0
    known: int = 0
    skipped: int = 0
    max_error_ratio: float = 0.0

    def add(self, progress: Progress) -> None:
        """Add what a worker reported."""
        self.cases += progress.cases
        self.seconds += progress.seconds
        self.known += progress.known
        self.skipped += progress.skipped
        self.max_error_ratio = max(self.max_error_ratio, progress.max_error_ratio)


@dataclass(slots=True)
class Statistics:
    """Everything about a campaign that changes while it runs. Times are on the monotonic clock."""

    kernels: dict[str, KernelStatistics]
    started: float
    deadline: float
    device: str
    device_name: str
    workers: int
    seed: int
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def of_kernels(cls, declarations: Sequence[Declaration]) -> dict[str, KernelStatistics]:
        """Empty statistics by target."""
        return {declaration.target: KernelStatistics(declaration) for declaration in declarations}

    @property
    def cases(self) -> int:
        """Cases judged."""
        return sum(kernel.cases for kernel in self.kernels.values())

    def elapsed_s(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self.started

    def remaining_s(self) -> float:
        """Seconds of the budget that are left."""
        return max(0.0, self.deadline - time.monotonic())


@dataclass(frozen=True, slots=True)
class CampaignResult:
    """What a campaign found. ``unconfirmed`` failures never came back; ``troubles`` are errors of the framework."""

    stop_reason: StopReason
    elapsed_s: float
    statistics: Statistics
    findings: tuple[Finding, ...]
    unconfirmed: tuple[Finding, ...] = ()
    troubles: tuple[str, ...] = ()

    def findings_of(self, target: str) -> list[Finding]:
        """The findings of one kernel."""
        return [finding for finding in self.findings if finding.declaration.target == target]
