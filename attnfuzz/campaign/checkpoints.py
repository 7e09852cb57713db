"""When the state of a campaign is written, and what goes into it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.messages import Known, Pursue
from attnfuzz.campaign.result import Statistics
from attnfuzz.campaign.state import Asked, SavedFinding, State, StateFile
from attnfuzz.problems.cases import encode_case

__all__ = ["Checkpoints"]

_EVERY_S = 5.0
_AT_MOST_EVERY_S = 0.5


class Checkpoints:
    """Writes to ``file`` every few seconds, and soon after ``news``; nothing if ``file`` is None."""

    def __init__(self, file: StateFile | None, asked: Asked, *, parts: int = 0) -> None:
        self._file = file
        self._asked = asked
        self._parts = parts
        self._last = time.monotonic()
        self._news = False

    def news(self) -> None:
        """Something was found that should not wait."""
        self._news = True

    @property
    def is_due(self) -> bool:
        """Whether it is time to write."""
        interval_s = _AT_MOST_EVERY_S if self._news else _EVERY_S
        return self._file is not None and time.monotonic() - self._last >= interval_s

    def write(
        self, statistics: Statistics, findings: Sequence[Finding], known: Sequence[Known], pending: Sequence[Pursue]
    ) -> None:
        """Write how things stand. ``known`` are the signatures of ``findings`` that are done with."""
        if self._file is None:
            return
        self._last, self._news = time.monotonic(), False
        elapsed_s = statistics.elapsed_s()
        cut_off = [_pursue(finding) for finding in findings if finding.shrunk_s is None]
        state = State(
            asked=msgspec.structs.replace(self._asked, budget_s=elapsed_s + statistics.remaining_s()),
            seed=statistics.seed,
            elapsed_s=elapsed_s,
            parts=self._parts + 1,
            kernels=tuple(statistics.kernels.values()),
            interval_s=statistics.throughput.interval_s,
            throughput={device: tuple(counts) for device, counts in statistics.throughput.counts.items()},
            findings=tuple(map(SavedFinding.of, findings)),
            known=tuple(known),
            pending=tuple({(one.kernel, bytes(one.case)): one for one in (*pending, *cut_off)}.values()),
        )
        self._file.write(state)

    def remove(self) -> None:
        """The campaign has run to its end."""
        if self._file is not None:
            self._file.remove()


def _pursue(finding: Finding) -> Pursue:
    case = msgspec.Raw(encode_case(finding.case))
    return Pursue(kernel=finding.declaration.target, case=case, failure=finding.failure)
