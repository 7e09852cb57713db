"""Cases a second over a campaign of any length: a bounded number of equally long intervals for each device."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

__all__ = ["MAX_INTERVALS", "Throughput"]

MAX_INTERVALS = 240
_RECENT_S = 10.0


@dataclass(slots=True)
class Throughput:
    """``counts[device][i]`` cases were judged from ``i * interval_s`` seconds on; intervals double when many."""

    interval_s: float = 1.0
    counts: dict[str, list[int]] = field(default_factory=dict)
    recent: deque[tuple[float, str, int]] = field(default_factory=deque)

    def add(self, device: str, at_s: float, cases: int) -> None:
        """Count ``cases`` that were reported ``at_s`` seconds after the campaign began, by a worker on ``device``."""
        while at_s >= self.interval_s * MAX_INTERVALS:
            self._double()
        counts = self.counts.setdefault(device, [])
        index = int(at_s / self.interval_s)
        counts.extend([0] * (index + 1 - len(counts)))
        counts[index] += cases
        self.recent.append((at_s, device, cases))
        self._forget(at_s)

    def add_later(self, other: Throughput, late_s: float) -> None:
        """Add those of a campaign that began ``late_s`` seconds after this one."""
        for device, counts in other.counts.items():
            for number, cases in enumerate(counts):
                self.add(device, late_s + number * other.interval_s, cases)

    def rates(self, now_s: float) -> dict[str, float]:
        """Cases a second by device, over the last ten seconds (or all of them, if there are fewer)."""
        self._forget(now_s)
        sums: defaultdict[str, int] = defaultdict(int)
        for _, device, cases in self.recent:
            sums[device] += cases
        return {device: sums[device] / max(min(now_s, _RECENT_S), 1e-9) for device in self.counts}

    def _forget(self, now_s: float) -> None:
        while self.recent and self.recent[0][0] < now_s - _RECENT_S:
            self.recent.popleft()

    def _double(self) -> None:
        self.interval_s *= 2
        for counts in self.counts.values():
            counts[:] = [sum(counts[i : i + 2]) for i in range(0, len(counts), 2)]
