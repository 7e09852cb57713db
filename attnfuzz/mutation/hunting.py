"""The hunt for one mutant: explore's search and confirmation, without shrinking, over all kernels that run it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle

import msgspec

from attnfuzz.campaign.draw.sampling import BatchSize, derive_seed, run_round
from attnfuzz.campaign.judge.case_judge import CaseJudge, OutOfTime, Unjudged
from attnfuzz.campaign.judge.journal import Journal
from attnfuzz.campaign.triage.confirmation import Retries, confirm
from attnfuzz.campaign.triage.known_deaths import KnownDeaths
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import FailingCase
from attnfuzz.isolation.zygote_client import Zygote
from attnfuzz.judging.runner import Runner
from attnfuzz.mutation.mutants import Kill
from attnfuzz.oracles.registry import OracleName, oracle_of
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.declared_numerics import Tolerance
from attnfuzz.problems.formats import Format
from attnfuzz.strategies.cases import case_lists
from attnfuzz.strategies.formats import first_formats
from attnfuzz.strategies.sizes import CPU_SIZES, GPU_SIZES
from attnfuzz.verdict import Verdict

_MOST_TOGETHER = 64
_CONFIRMATION_LIMIT = 4.0
"""Times as long as a hang may last: for a failure that is met at the end of the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunter:
    """The settings of all hunts of a measurement. ``hang_s``: a case that takes longer hangs."""

    zygote: Zygote
    device: str
    streams: Mapping[str, CaseStream]
    oracles: tuple[OracleName, ...]
    tolerance: Tolerance = "bound"
    budget_s: float
    hang_s: float
    memory_limit_bytes: int | None = None

    def runner(self, environment: Mapping[str, str]) -> Runner:
        """Executors that load what ``environment`` lays over the sources."""
        return Runner(
            device=self.device,
            oracles=self.oracles,
            tolerance=self.tolerance,
            timeout_s=self.hang_s,
            memory_limit_bytes=self.memory_limit_bytes,
            environment=environment,
            zygote=self.zygote,
        )


@dataclass(frozen=True, slots=True)
class Hunted:
    """The outcome of a hunt: without a kill the mutant survived ``cases`` cases. ``slowest_s``: no case took longer."""

    kill: Kill | None
    cases: int
    seconds: float
    slowest_s: float = 0.0
    complaints: tuple[str, ...] = ()


@dataclass(slots=True)
class _KernelHunt:
    """How far the hunt has come on one kernel."""

    declaration: Declaration
    stream: CaseStream
    size: BatchSize = field(default_factory=lambda: BatchSize(_MOST_TOGETHER))
    next: int = 0

    def take(self) -> Sequence[Case]:
        cases = self.stream.take(self.next, self.size.size)
        self.next += len(cases)
        return cases


class Hunt:
    """One hunt, in executors of ``runner``; a failure is first confirmed in ``spare``, a fresh one, if there is any."""

    def __init__(
        self, hunter: Hunter, runner: Runner, kernels: Sequence[Declaration], *, spare: Future[Runner] | None = None
    ) -> None:
        self._spare = spare
        self._started = time.monotonic()
        self._until = self._started + hunter.budget_s
        self._places = [_KernelHunt(one, hunter.streams[one.target]) for one in kernels]
        self._cases = 0
        self._slowest_s = 0.0
        self._complaints: list[str] = []
        self._judge = CaseJudge(
            runner,
            deadline=self._until + _CONFIRMATION_LIMIT * hunter.hang_s,
            longest_s=hunter.hang_s,
            journal=Journal(None),
            complain=self._complaints.append,
            renew=self._renewed,
        )

    def run(self) -> Hunted:
        """Search until a kill, or until the time or the cases are used up."""
        kill = None
        with contextlib.suppress(OutOfTime):  # nothing was found in the time that there was
            kill = self._search()
        elapsed_s = time.monotonic() - self._started
        return Hunted(kill, self._cases, elapsed_s, self._slowest_s, tuple(self._complaints))

    def _search(self) -> Kill | None:
        exhausted: set[str] = set()
        for place in cycle(self._places):
            if time.monotonic() >= self._until or len(exhausted) == len(self._places):
                return None
            cases = place.take()
            if not cases:
                exhausted.add(place.declaration.target)
            elif (kill := self._judge_batch(place, cases)) is not None:
                return kill
        return None

    def _judge_batch(self, place: _KernelHunt, cases: Sequence[Case]) -> Kill | None:
        started = time.monotonic()
        verdicts = self._judge.together(place.declaration, cases) if len(cases) > 1 else None
        if verdicts is None:
            place.size.went_wrong()
            return self._judge_each(place, cases)
        elapsed_s = time.monotonic() - started
        self._slowest_s = max(self._slowest_s, elapsed_s)  # one of them may have taken nearly all of it
        compile_s = sum(verdict.timing.compile_s for verdict in verdicts)
        place.size.went_well(max(0.0, elapsed_s - compile_s), len(cases))
        for case, verdict in zip(cases, verdicts, strict=True):
            if (kill := self._weigh(place, case, verdict)) is not None:
                return kill
        return None

    def _judge_each(self, place: _KernelHunt, cases: Sequence[Case]) -> Kill | None:
        for case in cases:
            started = time.monotonic()
            try:
                verdict = self._judge(place.declaration, case)
            except Unjudged:
                continue
            elapsed_s = time.monotonic() - started
            self._slowest_s = max(self._slowest_s, elapsed_s)
            if verdict.failure is None:
                place.size.went_well(max(0.0, elapsed_s - verdict.timing.compile_s), 1)
            if (kill := self._weigh(place, case, verdict)) is not None:
                return kill
        return None

    def _weigh(self, place: _KernelHunt, case: Case, verdict: Verdict) -> Kill | None:
        """A kill, if the case failed and its failure comes back."""
        self._cases += 1
        failure = verdict.failure
        if failure is None:
            return None
        declaration, cases, first_seen_s = place.declaration, self._cases, time.monotonic() - self._started
        suspect = FailingCase(declaration, case, failure, self._judge.history.before(declaration, case))
        relations = oracle_of(failure.oracle).relations
        retries = Retries(self._judge, declaration, deaths=KnownDeaths(), relations=relations)
        confirmation = confirm(suspect, retries)
        if not confirmation.failures:
            return None
        confirmed = confirmation.failures[0]
        return Kill(
            by=confirmed.oracle,
            seconds=time.monotonic() - self._started,
            first_seen_s=first_seen_s,
            kernel=declaration.target,
            cases=cases,
            case=msgspec.Raw(encode_case(confirmation.failing.case)),
            failure=confirmed,
            flaky=confirmation.is_flaky,
        )

    def _renewed(self, runner: Runner) -> Runner:
        if self._spare is None:
            runner.restart()
            return runner
        runner, self._spare = self._spare.result(), None
        return runner


_CASES_PER_LIST = 8
_LISTS_PER_ROUND = 25
_MAX_EMPTY_ROUNDS = 3
_FORMATS = 16
"""On a GPU, where each costs a compilation: the first rounds have few of them, later ones all."""


class CaseStream:
    """All different cases of one kernel, in an order that ``seed`` decides; for several threads."""

    def __init__(self, declaration: Declaration, *, seed: int, device: str) -> None:
        self._declaration = declaration
        self._seed = seed
        self._sizes = GPU_SIZES if device == "cuda" else CPU_SIZES
        self._formats = self._first_formats() if device == "cuda" else []
        self._lock = threading.Lock()
        self._cases: list[Case] = []
        self._seen: set[bytes] = set()
        self._rounds = 0
        self._empty_rounds = 0

    def take(self, start: int, count: int) -> Sequence[Case]:
        """Cases ``start`` to ``start + count``; fewer where there are no more."""
        with self._lock:
            while len(self._cases) < start + count and self._empty_rounds < _MAX_EMPTY_ROUNDS:
                self._draw()
            return self._cases[start : start + count]

    def _draw(self) -> None:
        """A round of at most 200 cases. The first that a round draws are the simplest."""
        before = len(self._cases)
        self._rounds += 1
        run_round(
            case_lists(
                self._declaration.problem,
                length=_CASES_PER_LIST,
                supports=self._declaration.supports,
                options=self._declaration.options,
                sizes=self._sizes,
                formats=self._formats[: 2 * self._rounds],
            ),
            self._keep,
            seed_value=derive_seed(self._seed, self._declaration.name, self._rounds),
            until=math.inf,
            max_draws=_LISTS_PER_ROUND,
        )
        self._empty_rounds = 0 if len(self._cases) > before else self._empty_rounds + 1

    def _keep(self, cases: list[Case]) -> bool:
        for case in cases:
            encoded = encode_case(case)
            if encoded not in self._seen:
                self._seen.add(encoded)
                self._cases.append(case)
        return True

    def _first_formats(self) -> list[Format]:
        declaration = self._declaration
        return list(
            first_formats(
                declaration.problem,
                count=_FORMATS,
                supports=declaration.supports,
                options=declaration.options,
                sizes=self._sizes,
            )
        )


@contextlib.contextmanager
def spare_runner(make: Callable[[], Runner], kernels: Sequence[Declaration]) -> Iterator[Future[Runner]]:
    """A runner of ``make`` whose executor starts CUDA and imports ``kernels`` meanwhile, and runs nothing.

    On a GPU that takes as long as a case does with its compilation. It is closed at the end. Asked for, it raises what
    starting and importing raise.
    """
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(make)

        def ready() -> Runner:
            runner = made.result()
            runner.kernels.start_device()
            runner.kernels.import_known(kernels)
            return runner

        prepared = pool.submit(ready)
        try:
            yield prepared
        finally:
            if made.exception() is None:  # waits for it
                concurrent.futures.wait([prepared])
                made.result().close()
