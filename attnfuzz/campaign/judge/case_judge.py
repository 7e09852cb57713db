"""Judging in a worker: journalled first, within a time limit that is learned, and never past the deadline.

The executor is replaced by a fresh one where that is asked for, or memory runs short. One batch is judged in the
background while the cases of the next are drawn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from attnfuzz.campaign.judge.journal import Journal
from attnfuzz.campaign.judge.process_memory import History, MemoryWatch
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.isolation.outcomes import DeadlinePassed, ExecutorUnavailable, ServiceError
from attnfuzz.judging.runner import ProblemUnusable, Runner
from attnfuzz.oracles.registry import HANG
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.formats import format_key, format_of
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.verdict import Failure, Relations, Verdict

_ENOUGH_CASES = 10
_SLOWER_THAN_EVER = 20.0
_LEAST_S = 2.0
_CERTAIN_S = 10.0
_SLOWER_WHEN_SHORT = 5.0
_SHORT_PART = 0.05
_BATCH_PART = 0.25


@dataclass(slots=True)
class _CaseTimes:
    passed: int = 0
    slowest_s: float = 0.0

    def add(self, seconds: float, cases: int) -> None:
        self.passed += cases
        self.slowest_s = max(self.slowest_s, seconds)


@dataclass(slots=True)
class AdaptiveTimeout:
    """The limit for one kernel: ``longest_s`` until ten cases have passed, then 20 times the slowest of them.

    The first case of a format in a process may compile in that very process for as long as it likes, and looks like a
    loop without end meanwhile: such cases are ``first``, have the longest time until ten *of them* have passed, and
    teach nothing about the others. A shorter limit only raises the suspicion: a hang is confirmed with ``certain_s``.
    The ``short`` limit is for trying out many smaller cases that may hang, and does not wait for ten to pass: 5 times
    the slowest.
    """

    longest_s: float
    _all: _CaseTimes = field(default_factory=_CaseTimes)
    _first: _CaseTimes = field(default_factory=_CaseTimes)
    _later: _CaseTimes = field(default_factory=_CaseTimes)

    def limit_s(self, *, first: bool = False, short: bool = False) -> float:
        """The limit for the next case in seconds."""
        seen = self._first if first else self._later if self._later.passed >= _ENOUGH_CASES else self._all
        if short:
            return self._limit_s(_SHORT_PART * self.longest_s, _SLOWER_WHEN_SHORT * seen.slowest_s)
        if seen.passed < _ENOUGH_CASES:
            return self.longest_s
        return self._limit_s(_LEAST_S, _SLOWER_THAN_EVER * seen.slowest_s)

    def batch_limit_s(self, cases: int) -> float:
        """The limit for a batch: each of its cases may be as slow as any, and is judged alone if the batch is late."""
        slowest_s = self._all.slowest_s
        return self._limit_s(_BATCH_PART * self.longest_s, _SLOWER_THAN_EVER * slowest_s) + (cases - 1) * slowest_s

    @property
    def certain_s(self) -> float:
        """Seconds after which a case hangs for certain: ``longest_s``, or less if others end much sooner."""
        if self._all.passed < _ENOUGH_CASES:
            return self.longest_s
        return self._limit_s(_CERTAIN_S, _SLOWER_THAN_EVER * self._all.slowest_s)

    def _limit_s(self, least_s: float, limit_s: float) -> float:
        return min(self.longest_s, max(least_s, limit_s))

    def record(self, seconds: float, *, cases: int = 1, first: bool = False) -> None:
        """Learn from cases that ended by themselves, none of which took more than ``seconds``."""
        for seen in (self._all, self._first if first else self._later):
            seen.add(seconds, cases)


Patience = Literal["learned", "short", "longest"]
_MAX_COMPLAINTS = 5
"""Errors of the framework that are lived with, each on its own case, before one ends the worker."""
_FORMATS_KEPT = 1 << 14
"""Formats that are remembered of a process: on a CPU nearly every case has one of its own."""
_EXPLAINING_S = 3.0
"""Seconds of the campaign that must be left for a finding to be explained."""
GRACE_S = 1.0
"""How far past the deadline a case may run on before it is given up."""
_WAIT_FOR_BATCH_S = 0.5
_COSTLY_S = 0.25
"""Seconds of a compiler for a format from which on it is costly: as long as many runs in the interpreter take."""
_LEAST_FOR_INTERPRETER_S = 5.0
"""Seconds of the campaign that must be left for the interpreter, whose processes take seconds to start."""


class OutOfTime(Exception):  # noqa: N818 - control flow, like StopIteration
    """The deadline passed before the case was judged; ``after_s`` is how long it had been running."""

    def __init__(self, after_s: float) -> None:
        super().__init__(after_s)
        self.after_s = after_s


class Unjudged(Exception):  # noqa: N818 - control flow, like StopIteration
    """The framework failed on the case, and has said so: nothing is known of the kernel."""


class LeakSearch(NamedTuple):
    """A kernel that had made its process grow, called many times on ``case``; no ``failure`` if it does not leak."""

    declaration: Declaration
    case: Case
    failure: Failure | None


@dataclass(slots=True)
class _Compiled:
    """``formats`` of a kernel that a case has been judged in, and the seconds of Triton's compiler for all of them."""

    formats: set[int] = field(default_factory=set)
    seconds: float = 0.0

    @property
    def is_costly(self) -> bool:
        return self.seconds > _COSTLY_S * len(self.formats)


class CaseJudge:
    """Has cases judged by ``runner`` until ``deadline``, with one adaptive timeout for each kernel.

    ``renew`` gives a runner whose process has not run any case before, in place of the one it is given; ``memory``
    watches what the process takes. ``explain`` says what is wrong with a case that failed; without it nobody does.
    ``complain`` hears of the framework's own errors, ``problem_fails`` of those of a user's problem.
    ``interpret`` makes what runs cases in Triton's interpreter, beside a runner that compiles kernels.
    Each method may be called from another thread than the rest: one call waits for the other.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        deadline: float,
        longest_s: float,
        journal: Journal,
        memory: MemoryWatch | None = None,
        explain: Callable[[Runner, Declaration, Case, Failure], Explanation] | None = None,
        complain: Callable[[str], None] = lambda text: None,
        problem_fails: Callable[[str], None] | None = None,
        renew: Callable[[Runner], Runner] | None = None,
        interpret: Callable[[], Runner] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.deadline = deadline
        self.lost: Failure | None = None
        """How the last batch lost its process, if it did; not if it was cut short at the deadline."""
        self.history = History()
        self._runner = runner
        self._renew = renew or _sibling_of
        self._renewals = 0
        self._memory = memory
        self._explain = explain
        self._longest_s = longest_s
        self._journal = journal
        self._complain = complain
        self._problem_fails = problem_fails or complain
        self._complaints_left = _MAX_COMPLAINTS
        self._told_of_batches: set[str] = set()
        self._told_of_problems: set[str] = set()
        self._clock = clock
        self._interpret = interpret
        self._interpreter: CaseJudge | None = None
        self._not_interpreted: set[str] = set()
        self._compiled: dict[str, _Compiled] = {}
        self._seen_formats: tuple[Hashable, set[int]] = (None, set())
        self._timeouts: dict[str, AdaptiveTimeout] = {}
        self._running = threading.Lock()

    def __call__(
        self,
        declaration: Declaration,
        case: Case,
        *,
        patience: Patience = "learned",
        afresh: bool = False,
        relations: Relations = None,
    ) -> Verdict:
        """The verdict on ``case``, in a fresh process if ``afresh``; on one that passes otherwise, of ``relations``.

        ``patience`` says how long it may take: what has been learned, a time for trying things out or the longest time.
        Raises OutOfTime when the deadline cuts the case short, and Unjudged where the framework fails on it.
        """
        with self._running:
            timeout = self._timeout_of(declaration)
            first = afresh or self._is_first(declaration, case)
            if patience == "longest":
                limit_s = timeout.certain_s
            else:
                limit_s = timeout.limit_s(first=first, short=patience == "short")
            started = self._clock()
            remaining_s = self._remaining_s(started)
            if remaining_s <= 0:
                raise OutOfTime(0.0)
            self._journal.write(declaration, [case])
            with self._complaining(declaration, case), self._watched(declaration, [case], afresh=afresh):
                limited_s = min(limit_s, remaining_s)
                verdict = self._runner.judge(declaration, case, timeout_s=limited_s, relations=relations)
            hung = verdict.failure is not None and verdict.failure.oracle == HANG.name
            if hung and remaining_s < limit_s:
                raise OutOfTime(self._clock() - started)
            if not hung:
                timeout.record(self._clock() - started - verdict.timing.built_s, first=first)
                self._has_run(declaration, [case], [verdict])
            return verdict

    def together(
        self, declaration: Declaration, cases: Sequence[Case], *, relations: Relations = None
    ) -> Sequence[Verdict] | None:
        """A verdict for each of ``cases``; None if each has to be judged alone to know what became of it.

        That is so after a crash, a hang and an error of the framework, and at the deadline.
        """
        with self._running:
            self.lost = None
            timeout = self._timeout_of(declaration)
            started = self._clock()
            remaining_s = self._remaining_s(started)
            if remaining_s <= 0:
                return None
            self._journal.write(declaration, cases)
            limit_s = min(timeout.batch_limit_s(len(cases)), remaining_s)
            try:
                verdicts = self._judge_in_parts(declaration, cases, limit_s, relations)
            except DeadlinePassed:
                return None
            except (CaseTooLarge, ProblemUnusable):  # if a case is that by itself, it is told when it is judged alone
                return None
            except ServiceError as error:
                if declaration.target not in self._told_of_batches:  # no case shows it: the search would only be slow
                    self._told_of_batches.add(declaration.target)
                    number, target = len(cases), declaration.target
                    self._complain(f"{number} cases of {target} are judged one by one, not together: {error}")
                return None
            if verdicts is None:
                lost = self._runner.lost
                is_cut = lost is not None and lost.oracle == HANG.name and limit_s == remaining_s
                self.lost = None if is_cut else lost
            else:
                first = any(self._is_first(declaration, case) for case in cases)
                timeout.record(_slowest_s(verdicts, self._clock() - started), cases=len(verdicts), first=first)
                self._has_run(declaration, cases, verdicts)
            return verdicts

    def compiles_for_long(self, declaration: Declaration, case: Case | None = None) -> bool:
        """Whether the formats of a kernel take Triton's compiler long; of a ``case``, whether its format would now."""
        compiled = self._compiled.get(declaration.target)
        if compiled is None or not compiled.is_costly:
            return False
        return case is None or _format_hash(declaration, case) not in compiled.formats

    def in_interpreter(
        self, declaration: Declaration, case: Case, *, patience: Patience, relations: Relations = None
    ) -> Verdict | None:
        """The verdict on ``case`` where Triton's interpreter runs the kernel, beside the GPU; None if none can be had.

        Raises OutOfTime.
        """
        judge = self.start_interpreter(declaration)
        if judge is None:
            return None
        try:
            verdict = judge(declaration, case, patience=patience, relations=relations)
        except Unjudged:
            return None
        except (ExecutorUnavailable, KernelLoadError) as error:  # it goes on without
            self._not_interpreted.add(declaration.target)
            self._complain(f"{declaration.target} is not run in Triton's interpreter beside the GPU: {error}")
            return None
        return None if verdict.not_runnable else verdict

    def start_interpreter(self, declaration: Declaration | None = None) -> CaseJudge | None:
        """Have what runs cases in the interpreter start, for seconds and in the background; what judges them.

        None where there is none yet, or not for ``declaration``, and of a kernel whose formats take no compiler long.
        """
        if declaration is not None and not self.compiles_for_long(declaration):
            return None
        if self._interpreter is None and self._interpret is not None:
            if self._remaining_s(self._clock()) < _LEAST_FOR_INTERPRETER_S:
                return None
            try:
                runner = self._interpret()
            except ExecutorUnavailable as error:
                self._interpret = None
                self._complain(f"no case is run in Triton's interpreter beside the GPU: {error}")
                return None
            self._interpreter = CaseJudge(
                runner, deadline=self.deadline, longest_s=runner.timeout_s, journal=Journal(None), clock=self._clock
            )
        if declaration is not None and declaration.target in self._not_interpreted:
            return None
        is_ready = self._interpreter is not None and self._interpreter._runner.is_ready
        return self._interpreter if is_ready else None

    def find_leak(self, declaration: Declaration, case: Case) -> Failure | None:
        """The failure of a kernel that keeps more memory with every call on ``case``; None if it does not.

        Raises OutOfTime if the deadline has passed before or on the way, and Unjudged where the framework fails on it.
        """
        with self._running:
            started = self._clock()
            remaining_s = self._remaining_s(started)
            if remaining_s <= 0:
                raise OutOfTime(0.0)
            self._journal.write(declaration, [case])
            with self._complaining(declaration, case):
                failure = self._runner.find_leak(declaration, case, timeout_s=min(self._longest_s, remaining_s))
            if failure is None and self._remaining_s(self._clock()) <= 0:
                raise OutOfTime(self._clock() - started)
            return failure

    def look_for_leak(self) -> LeakSearch | None:
        """Find out about the kernel that has made the process grow; None if none has, or there is no time for it."""
        suspect = None if self._memory is None else self._memory.suspect
        if self._memory is None or suspect is None:
            return None
        declaration, case = suspect
        try:
            failure = self.find_leak(declaration, case)
        except OutOfTime:
            return None
        except Unjudged:
            failure = None
        self._memory.checked(declaration, leaks=failure is not None)
        return LeakSearch(declaration, case, failure)

    def leaks(self, target: str) -> None:
        """Another worker has found that a kernel leaks: its processes are replaced before they are full."""
        if self._memory is not None:
            self._memory.leaks(target)

    def explain(self, declaration: Declaration, case: Case, failure: Failure) -> Explanation:
        """Explain a case that failed, in a few lines; empty without the time for it.

        Raises Unjudged where the framework fails on it.
        """
        with self._running:
            if self._explain is None or self._remaining_s(self._clock()) < _EXPLAINING_S:
                return Explanation()
            self._journal.write(declaration, [case])
            try:
                with self._complaining(declaration, case), self._watched(declaration, [case]):
                    return self._explain(self._runner, declaration, case, failure)
            except OutOfTime:  # while the kernel was built for it
                return Explanation()

    def close(self) -> None:
        """End the executor. One that hangs in the background ends with this process, which holds its connection."""
        if self._interpreter is not None:
            self._interpreter.close()
        if self._running.acquire(timeout=_WAIT_FOR_BATCH_S):
            self._runner.close()

    def _judge_in_parts(
        self, declaration: Declaration, cases: Sequence[Case], timeout_s: float, relations: Relations
    ) -> list[Verdict] | None:
        verdicts: list[Verdict] = []
        for part in [cases] if self._memory is None else self._memory.batches(declaration, cases):
            with self._watched(declaration, part):
                found = self._runner.judge_together(declaration, part, timeout_s=timeout_s, relations=relations)
            if found is None:
                return None
            verdicts += found
        return verdicts

    @contextmanager
    def _watched(self, declaration: Declaration, cases: Sequence[Case], *, afresh: bool = False) -> Iterator[None]:
        """While ``cases`` run: what they do to the process is noted, and one that is too full is replaced before."""
        watch = self._memory
        if afresh or (watch is not None and watch.wants_fresh(declaration)):
            self._runner = self._renew(self._runner)
            self._renewals += 1
        if watch is not None:
            watch.look_before(self._process, self._runner.memory_bytes)
        try:
            yield
        finally:
            process = self._process
            self.history.record(process, declaration, cases)
            if watch is not None:
                taken, gpu_share = self._runner.memory_bytes, self._runner.gpu_share
                watch.look_after(process, declaration, cases, memory_bytes=taken, gpu_share=gpu_share)

    @property
    def _process(self) -> tuple[int, int]:
        """Tells the process that judged last from those before it."""
        return self._renewals, self._runner.restarts

    def _timeout_of(self, declaration: Declaration) -> AdaptiveTimeout:
        return self._timeouts.setdefault(declaration.target, AdaptiveTimeout(self._longest_s))

    def _is_first(self, declaration: Declaration, case: Case) -> bool:
        """Whether the process has run no case of this format on the kernel, so that it may have to compile."""
        process, seen = self._seen_formats
        return process is None or process != self._runner.pid or _format_hash(declaration, case) not in seen

    def _has_run(self, declaration: Declaration, cases: Sequence[Case], verdicts: Sequence[Verdict]) -> None:
        process, seen = self._seen_formats
        if process != (now := self._runner.pid) or len(seen) > _FORMATS_KEPT:
            seen = set()
        hashes = {_format_hash(declaration, case) for case in cases}
        seen |= hashes
        self._seen_formats = now, seen
        compiled = self._compiled.setdefault(declaration.target, _Compiled())
        if len(compiled.formats) > _FORMATS_KEPT:
            compiled = self._compiled[declaration.target] = _Compiled()
        compiled.formats |= hashes
        compiled.seconds += sum(verdict.timing.compile_s - verdict.timing.built_s for verdict in verdicts)

    def _remaining_s(self, now: float) -> float:
        return self.deadline + GRACE_S - now

    @contextmanager
    def _complaining(self, declaration: Declaration, case: Case) -> Iterator[None]:
        """Tell of the framework's own errors, up to a number, and raise Unjudged in their place."""
        began = self._clock()
        try:
            yield
        except DeadlinePassed:
            raise OutOfTime(self._clock() - began) from None
        except ProblemUnusable as error:
            if declaration.target not in self._told_of_problems:
                self._told_of_problems.add(declaration.target)
                self._problem_fails(f"{declaration.target} cannot be judged on some cases: {error}")
            raise Unjudged from error
        except (ServiceError, CaseTooLarge) as error:
            self._complaints_left -= 1
            if self._complaints_left < 0:
                raise
            self._complain(f"{declaration.target} on {encode_case(case).decode()} cannot be judged: {error}")
            raise Unjudged from error


def _sibling_of(runner: Runner) -> Runner:
    made = runner.sibling()
    runner.close()
    return made


def _format_hash(declaration: Declaration, case: Case) -> int:
    return hash((declaration.target, format_key(format_of(case))))


def _slowest_s(verdicts: Sequence[Verdict], batch_s: float) -> float:
    """The most that one of the cases may have taken: compilations follow each other, the rest is shared."""
    batch_s -= sum(verdict.timing.built_s for verdict in verdicts)
    compile_s = [verdict.timing.compile_s - verdict.timing.built_s for verdict in verdicts]
    return max(compile_s) + max(0.0, batch_s - sum(compile_s))


_HEAD_START_S = 0.003
"""Time for the thread to send off a batch by itself. Every file that it writes lets go of the interpreter, and a thread
that draws meanwhile takes 5 ms to give it back: the executor would have nothing to do for 5 to 12 ms a batch."""


@dataclass(slots=True)
class JudgedBatch:
    """Cases judged together in ``seconds``.

    Without ``verdicts``, all that is known is that something is wrong with one of them. ``error`` was raised instead.
    """

    declaration: Declaration
    cases: Sequence[Case]
    verdicts: Sequence[Verdict] | None = None
    seconds: float = 0.0
    error: BaseException | None = None

    @property
    def warm_seconds(self) -> float:
        """Without compilations."""
        return max(0.0, self.seconds - sum(verdict.timing.compile_s for verdict in self.verdicts or ()))

    def case_seconds(self, verdict: Verdict) -> float:
        """Seconds of one of the cases: its own compilations and an equal share of the rest."""
        return verdict.timing.compile_s + self.warm_seconds / len(self.cases)


class Pipeline:
    """Holds at most one batch, which ``judge`` judges in a thread of its own."""

    def __init__(self, judge: Callable[[Declaration, Sequence[Case]], Sequence[Verdict] | None]) -> None:
        self._judge = judge
        self._batch: JudgedBatch | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there is a batch to collect, now or later."""
        return self._batch is not None

    @property
    def is_judging(self) -> bool:
        """Whether it would take time to collect the batch."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, declaration: Declaration, cases: Sequence[Case]) -> None:
        """Begin to judge ``cases``. Raises RuntimeError if the last batch has not been collected."""
        if self._batch is not None:
            raise RuntimeError("the last batch has not been collected: collect() it first")
        self._batch = JudgedBatch(declaration, cases)
        # a daemon, so that a kernel which hangs cannot keep a worker that was told to stop from ending
        self._thread = threading.Thread(target=self._run, args=(self._batch,), daemon=True)
        self._thread.start()
        self._thread.join(_HEAD_START_S)

    def collect(self, timeout_s: float | None = None) -> JudgedBatch | None:
        """The batch, once it has been judged; None if there is none, or not within ``timeout_s``. Raises its error."""
        if self._thread is None or self._batch is None:
            return None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        batch, self._batch, self._thread = self._batch, None, None
        if batch.error is not None:
            raise batch.error
        return batch

    def _run(self, batch: JudgedBatch) -> None:
        started = time.monotonic()
        try:
            batch.verdicts = self._judge(batch.declaration, batch.cases)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that collects
            batch.error = error
        batch.seconds = time.monotonic() - started
