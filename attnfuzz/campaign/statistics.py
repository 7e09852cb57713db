"""Counts of a campaign's cases: by a worker, in its reports, and of each kernel in all.

Errors over their bounds go into a histogram with bins of half a power of two, so that 1, the bound itself, is an edge.
Cases a second are kept in a bounded number of equally long intervals for each device.
Which levels of a kernel's input space, and which pairs of them, cases have had decides nothing of what is drawn: it is
for people, who look for what was never tried.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations_with_replacement, groupby, product, starmap
from typing import Annotated, Any

import msgspec

from attnfuzz.cases.features import CaseLevels, InputSpace, levels_of, pair_number
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.registry import EXCEPTION
from attnfuzz.problems.cases import Case
from attnfuzz.problems.feature import Feature
from attnfuzz.verdict import Verdict, ends_process


def pairs_of(placement: CaseLevels) -> Iterator[int]:
    """The pairs of a case's levels, each once and a level with itself too; of levels of sequences, if one has both."""
    pairs = {*combinations_with_replacement(placement.case, 2)}
    for row in placement.rows:
        pairs.update(product(placement.case, row), combinations_with_replacement(row, 2))
    return starmap(pair_number, pairs)


@dataclass(frozen=True)
class Coverage:
    """``counts``: cases by ``pair_number``, a level with itself included."""

    space: InputSpace
    counts: dict[int, int]

    @property
    def met(self) -> int:
        """Pairs of different levels that some case has had."""
        return pairs_met(self.counts)

    @cached_property
    def levels(self) -> tuple[Feature, ...]:
        """The levels that cases have had, one axis after the other."""
        return tuple(level for level in self.space.levels if self.cases_on(level))

    @property
    def unmet(self) -> tuple[Feature, ...]:
        """The levels that no case has had, whether or not the kernel takes them."""
        return tuple(level for level in self.space.levels if not self.cases_on(level))

    def cases(self, one: Feature, other: Feature) -> int:
        """Cases with both levels, the first axis first."""
        return self.counts.get(pair_number(self.space.numbers[one], self.space.numbers[other]), 0)

    def cases_on(self, level: Feature) -> int:
        """Cases with one level."""
        return self.cases(level, level)


def by_axis(levels: Iterable[Feature]) -> dict[str, tuple[Feature, ...]]:
    """``levels`` by the name of their axis."""
    return {axis: tuple(of_axis) for axis, of_axis in groupby(levels, key=lambda level: level.field)}


def coverage_of(declaration: Declaration, counts: dict[int, int]) -> Coverage:
    """The coverage of a kernel by cases that are counted in ``counts``."""
    return Coverage(InputSpace(declaration.problem, declaration.supports, declaration.options), counts)


def pairs_met(counts: Iterable[int]) -> int:
    """How many of the numbers are of two levels; a level with itself counts cases on it."""
    return sum(first != second for first, second in map(levels_of, counts))


LEAST, MOST = -28, 8
"""The first and last bin: up to 2**-14, and everything above 2**3.5."""
EXACT = LEAST - 1
"""The bin of cases without any error."""
NOT_FINITE = MOST + 1
"""The bin of wrong NaNs and infinities."""


def ratio_bin(ratio: float) -> int:
    """The bin of ``ratio`` >= 0: bin ``n`` holds what is above ``2**((n - 1) / 2)`` and at most ``2**(n / 2)``."""
    if not math.isfinite(ratio):
        return NOT_FINITE
    return EXACT if ratio <= 0 else min(MOST, max(LEAST, math.ceil(2 * math.log2(ratio))))


def above(number: int) -> float:
    """The upper edge of bin ``number``; a case whose bin ends above 1 has failed."""
    return math.pow(2.0, number / 2)


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
            self.interval_s *= 2
            for counts in self.counts.values():
                counts[:] = [sum(counts[i : i + 2]) for i in range(0, len(counts), 2)]
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

    def until(self, end_s: float) -> int:
        """Cases of the intervals that end by then."""
        return sum(sum(counts[: int(end_s / self.interval_s)]) for counts in self.counts.values())

    def _forget(self, now_s: float) -> None:
        while self.recent and self.recent[0][0] < now_s - _RECENT_S:
            self.recent.popleft()


Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e10)]
"""These rules hold where statistics are read from a file: a time of all workers together is three centuries at most."""
_Bin = Annotated[int, msgspec.Meta(ge=EXACT, le=NOT_FINITE)]


class CaseCounts(msgspec.Struct, kw_only=True):
    """Counts of cases on one kernel: sums, and the largest ``max_error_ratio``.

    ``seconds`` is all the time spent on cases; ``compile_s``, ``kernel_s``, ``reference_s`` and ``build_s`` are what
    executors say of it. ``known``: failures that findings explained; ``skipped``: cases not run for that. ``restarts``:
    executors lost to a case. ``ratios``: by dtype, cases in each bin of error over bound. ``coverage``: cases by pair
    of levels (`attnfuzz.cases.features`). ``not_runnable``: cases, which are not among the ``cases``, by why they
    cannot run here. ``related``: the cases on which each relation had a word; ``untried``: those on which none of its
    runs could be made. ``largest``: the most of what a case can
    have much of, by its name: tokens of a sequence, sequences, tokens in all.
    """

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
    ratios: dict[str, dict[_Bin, Count]] = {}
    coverage: dict[Count, Count] = {}
    not_runnable: dict[str, Count] = {}
    related: dict[str, Count] = {}
    untried: dict[str, Count] = {}
    largest: dict[str, Count] = {}

    def add(self, other: CaseCounts) -> None:
        """Add what was counted elsewhere."""
        for name in CaseCounts.__struct_fields__:
            mine, its = getattr(self, name), getattr(other, name)
            if name == "ratios":
                for dtype, counts in its.items():
                    _add_counts(mine.setdefault(dtype, {}), counts)
            elif name == "largest":
                _keep_largest(mine, its)
            elif isinstance(mine, dict):
                _add_counts(mine, its)
            else:
                setattr(self, name, max(mine, its) if name == "max_error_ratio" else mine + its)


class KernelStatistics(CaseCounts):
    """Counts of all cases on one kernel."""

    declaration: Declaration


class WorkerProgress(CaseCounts, tag="progress", kw_only=True):
    """Counts of a worker's cases on one kernel since its last report.

    ``device`` names the GPU that the worker has to itself, if there are several. ``known_by_finding``: failures, by the
    tag of the finding that explains them.
    """

    kernel: str
    device: str = ""
    known_by_finding: dict[str, int] = {}


def _add_counts(to: dict[Any, int], counts: dict[Any, int]) -> None:
    for key, count in counts.items():
        to[key] = to.get(key, 0) + count


def _keep_largest(to: dict[str, int], sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        to[name] = max(to.get(name, 0), size)


_REPORT_EVERY_S = 0.3


class ProgressMeter:
    """Counts per kernel; ``send`` gets what was added since the last report. ``device``: see ``WorkerProgress``."""

    def __init__(
        self, send: Callable[[WorkerProgress], None], clock: Callable[[], float] = time.monotonic, *, device: str = ""
    ) -> None:
        self._send = send
        self._clock = clock
        self._device = device
        self._unsent: dict[str, WorkerProgress] = {}
        self._cases: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._death_seconds: defaultdict[str, float] = defaultdict(float)
        self._spaces: dict[str, InputSpace] = {}
        self._last_report = clock()

    def joins(self, declaration: Declaration) -> None:
        """Count the cases of a kernel by what ``declaration`` promises, whatever part of that they are drawn from."""
        if declaration.target not in self._spaces:
            space = InputSpace(declaration.problem, declaration.supports, declaration.options)
            self._spaces[declaration.target] = space

    def cases(self, kernel: str) -> int:
        """Cases judged on ``kernel`` so far."""
        return self._cases[kernel]

    def share_of_known_deaths(self, kernel: str) -> float:
        """Part of the judging time on ``kernel`` that went into crashes and hangs that were known."""
        total = self._seconds[kernel]
        return self._death_seconds[kernel] / total if total else 0.0

    def judged(self, declaration: Declaration, case: Case, seconds: float, verdict: Verdict) -> None:
        """Count a case that took ``seconds`` in all, its own share of a batch included."""
        kernel, timing = declaration.target, verdict.timing
        self._seconds[kernel] += seconds
        counts = self._of(kernel)
        counts.seconds += seconds
        if verdict.not_runnable:
            _add_counts(counts.not_runnable, {verdict.not_runnable: 1})
            self._report_now_and_then()
            return
        self._cases[kernel] += 1
        counts.cases += 1
        counts.compile_s += timing.compile_s
        counts.kernel_s += timing.kernel_s
        counts.reference_s += timing.reference_s
        counts.build_s += timing.build_s
        counts.restarts += verdict.fatal or ends_process(verdict.failure)
        self.related(declaration, verdict)
        if seq_lens := getattr(case, "seq_lens", ()):
            sizes = {"sequence": max(seq_lens), "sequences": len(seq_lens), "tokens": sum(seq_lens)}
            _keep_largest(counts.largest, sizes)
        _count_ratio(counts, str(getattr(case, "dtype", "")), verdict)
        self.joins(declaration)  # unless it has
        _add_counts(counts.coverage, dict.fromkeys(pairs_of(self._spaces[kernel].place(case)), 1))
        self._report_now_and_then()

    def related(self, declaration: Declaration, verdict: Verdict) -> None:
        """Count the relations that had a word on a case, and those that could not be tried."""
        counts = self._of(declaration.target)
        _add_counts(counts.related, dict.fromkeys(verdict.related, 1))
        _add_counts(counts.untried, dict.fromkeys(verdict.untried, 1))

    def seconds(self, kernel: str) -> float:
        """Seconds that judging on ``kernel`` took so far."""
        return self._seconds[kernel]

    def known(self, kernel: str, death_seconds: float) -> None:
        """Count a failure that an earlier finding explains, and the time it cost if it was a crash or a hang."""
        self._of(kernel).known += 1
        self._death_seconds[kernel] += death_seconds

    def explained(self, kernel: str, finding: str, failures: int) -> None:
        """Count failures for the finding with the tag ``finding``."""
        _add_counts(self._of(kernel).known_by_finding, {finding: failures})

    def skipped(self, kernel: str, cases: int) -> None:
        """Count cases that were not run because they would crash or hang as an earlier one did."""
        if cases:
            self._of(kernel).skipped += cases

    def flush(self) -> None:
        """Report what has not been reported."""
        unsent, self._unsent = self._unsent, {}
        self._last_report = self._clock()
        for progress in unsent.values():
            self._send(progress)

    def _of(self, kernel: str) -> WorkerProgress:
        return self._unsent.setdefault(kernel, WorkerProgress(kernel=kernel, device=self._device))

    def _report_now_and_then(self) -> None:
        if self._clock() - self._last_report >= _REPORT_EVERY_S:
            self.flush()


def _count_ratio(counts: CaseCounts, dtype: str, verdict: Verdict) -> None:
    """A ratio that is not finite (a wrong NaN) is a finding and no measure of accuracy."""
    failure = verdict.failure
    if ends_process(failure) or (failure is not None and failure.oracle == EXCEPTION.name):
        return
    number = ratio_bin(verdict.error_ratio)
    _add_counts(counts.ratios.setdefault(dtype, {}), {number: 1})
    if number != NOT_FINITE:
        counts.max_error_ratio = max(counts.max_error_ratio, verdict.error_ratio)
