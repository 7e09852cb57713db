"""A campaign run for its figures: how many cases a second once it is under way, on which kernels."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from attnfuzz.campaign.result import CampaignResult, SilentReporter, Statistics
from attnfuzz.campaign.startup import CampaignRequest, run_campaign

__all__ = ["Measured", "measure_campaign"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A campaign and the part of it that counts: from the end of the warm-up to the last report.

    ``cases`` by target and ``seconds`` are those of that part; ``campaign_s`` includes the warm-up.
    """

    result: CampaignResult
    seconds: float
    cases: Mapping[str, int]
    campaign_s: float

    @property
    def rate(self) -> float:
        """Cases a second on all kernels."""
        return sum(self.cases.values()) / self.seconds if self.seconds > 0 else 0.0

    def rate_of(self, targets: Sequence[str]) -> float:
        """Cases a second on ``targets`` together."""
        return sum(self.cases.get(target, 0) for target in targets) / self.seconds if self.seconds > 0 else 0.0


def measure_campaign(
    kernels: Sequence[str],
    *,
    seconds: float,
    warmup_s: float,
    workers: int | None = None,
    device: str = "auto",
    seed: int = 0,
    environment: Mapping[str, str] | None = None,
    watch: SilentReporter | None = None,
) -> Measured:
    """Run ``kernels`` for ``warmup_s`` and then ``seconds``, both from when the first case has been judged.

    Findings are saved nowhere. ``environment`` is set for the campaign's processes; ``watch`` hears of its progress.
    """
    progress = _Progress(warmup_s, seconds, watch or SilentReporter())
    with tempfile.TemporaryDirectory(prefix="attnfuzz-bench-") as folder, _environment(environment or {}):
        request = CampaignRequest(
            kernels=tuple(kernels),
            started=time.monotonic(),
            budget_s=warmup_s + seconds + _STARTUP_ALLOWANCE_S,
            save_folder=Path(folder),
            workers=workers,
            device=device,
            seed=seed,
        )
        result = run_campaign(request, progress)
    seconds_counted, cases = progress.counted()
    return Measured(result, seconds_counted, cases, campaign_s=warmup_s + seconds_counted)


_STARTUP_ALLOWANCE_S = 600.0
"""How long it may take until the first case is judged; from then on the deadline is known."""


class _Progress(SilentReporter):
    def __init__(self, warmup_s: float, seconds: float, watch: SilentReporter) -> None:
        self._warmup_s = warmup_s
        self._seconds = seconds
        self._watch = watch
        self._counting_from: float | None = None
        self._first = self._last = (0.0, dict[str, int]())

    def started(self, statistics: Statistics) -> None:
        self._watch.started(statistics)

    def progress(self, statistics: Statistics) -> None:
        now = time.monotonic(), {target: kernel.cases for target, kernel in statistics.kernels.items()}
        if self._counting_from is None and statistics.cases:
            self._counting_from = now[0] + self._warmup_s
            statistics.deadline = self._counting_from + self._seconds
        if self._counting_from is None or now[0] <= self._counting_from:
            self._first = now
        self._last = now
        self._watch.progress(statistics)

    def counted(self) -> tuple[float, dict[str, int]]:
        """Seconds and cases between the end of the warm-up and the last report."""
        (began, before), (ended, after) = self._first, self._last
        return ended - began, {target: count - before.get(target, 0) for target, count in after.items()}


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
