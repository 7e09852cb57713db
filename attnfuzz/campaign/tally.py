"""What a worker has done on each kernel, told to the coordinator a few times a second."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from attnfuzz.campaign.messages import Progress
from attnfuzz.campaign.pair_counts import PairCounts
from attnfuzz.campaign.ratios import NOT_FINITE, ratio_bin
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Verdict, ends_process
from attnfuzz.problems.cases import Case
from attnfuzz.problems.input_space import InputSpace

__all__ = ["Tally"]

_REPORT_EVERY_S = 0.3


@dataclass(slots=True)
class _Counts:
    """What is added up between two reports; the names are those of ``Progress``."""

    cases: int = 0
    seconds: float = 0.0
    known: int = 0
    skipped: int = 0
    max_error_ratio: float = 0.0
    compile_s: float = 0.0
    kernel_s: float = 0.0
    reference_s: float = 0.0
    build_s: float = 0.0
    restarts: int = 0
    ratios: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    not_runnable: Counter[str] = field(default_factory=Counter)
    known_by_finding: Counter[str] = field(default_factory=Counter)


class Tally:
    """Counts per kernel; ``send`` gets what was added since the last report. ``device``: see ``Progress``."""

    def __init__(
        self, send: Callable[[Progress], None], clock: Callable[[], float] = time.monotonic, *, device: str = ""
    ) -> None:
        self._send = send
        self._clock = clock
        self._device = device
        self._unsent: defaultdict[str, _Counts] = defaultdict(_Counts)
        self._cases: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._death_seconds: defaultdict[str, float] = defaultdict(float)
        self._behind_seconds: defaultdict[str, float] = defaultdict(float)
        self._spaces: dict[str, InputSpace] = {}
        self._pairs: dict[str, PairCounts] = {}
        self._last_report = clock()

    def joins(self, declaration: Declaration) -> None:
        """Count the cases of a kernel by what ``declaration`` promises, whatever part of that they are drawn from."""
        if declaration.target not in self._spaces:
            space = InputSpace(declaration.problem, declaration.supports, declaration.options)
            self._spaces[declaration.target], self._pairs[declaration.target] = space, PairCounts(space.num_levels)

    def cases(self, kernel: str) -> int:
        """Cases judged on ``kernel`` so far."""
        return self._cases[kernel]

    def share_of_known_deaths(self, kernel: str) -> float:
        """Part of the judging time on ``kernel`` that went into crashes and hangs that were known."""
        total = self._seconds[kernel]
        return self._death_seconds[kernel] / total if total else 0.0

    def share_behind_known(self, kernel: str) -> float:
        """Part of the time on ``kernel`` that went into looking behind known bugs."""
        behind = self._behind_seconds[kernel]
        total = behind + self._seconds[kernel]
        return behind / total if total else 0.0

    def looked_behind_known(self, kernel: str, seconds: float) -> None:
        """Count time spent on relatives of a known failure."""
        self._behind_seconds[kernel] += seconds

    def judged(self, declaration: Declaration, case: Case, seconds: float, verdict: Verdict) -> None:
        """Count a case that took ``seconds`` in all, its own share of a batch included."""
        kernel, timing = declaration.target, verdict.timing
        self._seconds[kernel] += seconds
        counts = self._unsent[kernel]
        counts.seconds += seconds
        if verdict.not_runnable:
            counts.not_runnable[verdict.not_runnable] += 1
            self._report_now_and_then()
            return
        self._cases[kernel] += 1
        counts.cases += 1
        counts.compile_s += timing.compile_s
        counts.kernel_s += timing.kernel_s
        counts.reference_s += timing.reference_s
        counts.build_s += timing.build_s
        counts.restarts += verdict.fatal or ends_process(verdict.failure)
        _count_ratio(counts, str(getattr(case, "dtype", "")), verdict)
        self._place(declaration, case)
        self._report_now_and_then()

    def known(self, kernel: str, death_seconds: float) -> None:
        """Count a failure that an earlier finding explains, and the time it cost if it was a crash or a hang."""
        self._unsent[kernel].known += 1
        self._death_seconds[kernel] += death_seconds

    def explained(self, kernel: str, finding: str, failures: int) -> None:
        """Count failures for the finding with the tag ``finding``."""
        self._unsent[kernel].known_by_finding[finding] += failures

    def skipped(self, kernel: str) -> None:
        """Count a case that was not run because it would crash or hang as an earlier one did."""
        self._unsent[kernel].skipped += 1

    def flush(self) -> None:
        """Report what has not been reported."""
        unsent, self._unsent = self._unsent, defaultdict(_Counts)
        self._last_report = self._clock()
        for kernel, counts in unsent.items():
            fields = {name: getattr(counts, name) for name in _Counts.__slots__}
            coverage = self._pairs[kernel].take() if kernel in self._pairs else {}
            self._send(Progress(kernel=kernel, device=self._device, coverage=coverage, **fields))

    def _report_now_and_then(self) -> None:
        if self._clock() - self._last_report >= _REPORT_EVERY_S:
            self.flush()

    def _place(self, declaration: Declaration, case: Case) -> None:
        self.joins(declaration)  # unless it has
        self._pairs[declaration.target].add(self._spaces[declaration.target].place(case))


def _count_ratio(counts: _Counts, dtype: str, verdict: Verdict) -> None:
    """A ratio that is not finite (a wrong NaN) is a finding and no measure of accuracy."""
    failure = verdict.failure
    if ends_process(failure) or (failure is not None and failure.oracle == "exception"):
        return
    number = ratio_bin(verdict.error_ratio)
    counts.ratios[dtype][number] += 1
    if number != NOT_FINITE:
        counts.max_error_ratio = max(counts.max_error_ratio, verdict.error_ratio)
