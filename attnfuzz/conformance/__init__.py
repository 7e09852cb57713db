"""A fixed set of cases, put to the kernels of all engines: what passes, what fails, what is not supported. Torch-free.

Each case stands for a feature of inputs, and is judged once, described in the kernel's way. Sets are never changed; a
new one is a new version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from attnfuzz.campaign.workers import cores
from attnfuzz.cases.supported import translate, why_unsupported
from attnfuzz.data_files import read_data_file
from attnfuzz.declaration import Declaration
from attnfuzz.isolation.builds import GiveUp, OwnCompilers, never
from attnfuzz.isolation.outcomes import DeadlinePassed
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import DEAD_MEMORY, OracleName, oracle_of
from attnfuzz.problems.cases import Case, Problem, case_from_builtins, encode_case
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.verdict import Failure, Verdict

FORMAT = "attnfuzz.conformance-set/1"
_LATEST = 2
_MOST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ConformanceEntry:
    """``strict``: the case is about what translating it for a kernel would change, so it is put to kernels as it is.

    ``law``: the relation, or else the result that two runs share, that is asked of it, in place of the result alone.
    ``note``: the hash of the saved case that it is a copy of.
    """

    group: str
    feature: str
    case: Case
    strict: bool = False
    law: OracleName | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class ConformanceSet:
    """``seed``: of the drawn cases."""

    version: int
    seed: int
    entries: tuple[ConformanceEntry, ...]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    group: str
    feature: str
    problem: Problem
    strict: bool
    law: OracleName | None
    note: str
    case: dict[str, object]


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    seed: int
    entries: tuple[_Entry, ...]


def set_file(version: int) -> Path:
    """Where the set lies."""
    return Path(__file__).parent / f"set-{version}.json"


def load_set(version: int = _LATEST) -> ConformanceSet:
    """The set of a version."""
    document = msgspec.json.decode(read_data_file(set_file(version), _MOST_BYTES), type=_Document)
    entries = tuple(
        ConformanceEntry(
            one.group, one.feature, case_from_builtins(one.problem, one.case), one.strict, one.law, one.note
        )
        for one in document.entries
    )
    return ConformanceSet(document.version, document.seed, entries)


Status = Literal["pass", "fail", "unsupported", "not_run"]
TWO_RUNS: OracleName = DEAD_MEMORY.name
"""What a case is asked that runs twice, with other numbers in memory that holds no token."""
_PATIENCE = 6.0
"""Times that of a search, whose cases are smaller."""
_MOST_AT_ONCE = 8
"""Processes on one GPU, each with a context of its own."""
_STOPPED = "the command was stopped before"


@dataclass(frozen=True, slots=True)
class ConformanceOutcome:
    """What one case of the set came to on one kernel.

    ``case`` is the case as the kernel was given it, ``changes`` how that differs from the set's. ``why``: why it is
    unsupported, or was not run.
    """

    entry: ConformanceEntry
    case: Case
    status: Status
    changes: tuple[str, ...] = ()
    failure: Failure | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Examined:
    """One kernel and its outcomes, in the order of the set; cases that its problem does not have are left out."""

    declaration: Declaration
    outcomes: tuple[ConformanceOutcome, ...]

    def count(self, status: Status) -> int:
        """How many cases came to that."""
        return sum(one.status == status for one in self.outcomes)

    def failing(self) -> dict[str, tuple[ConformanceOutcome, ...]]:
        """The cases that failed, by cause, the smallest first."""
        failed = sorted((one for one in self.outcomes if one.failure is not None), key=_size)
        causes = dict.fromkeys(map(self.cause_of, failed))
        return {cause: tuple(one for one in failed if self.cause_of(one) == cause) for cause in causes}

    @property
    def is_unjudged(self) -> bool:
        """Whether none of the cases that it supports could be run."""
        return bool(self.count("not_run")) and not self.count("pass") + self.count("fail")

    def cause_of(self, outcome: ConformanceOutcome) -> str:
        """A stable word for what went wrong, "" if nothing did; where it is not sure, that of others if it may be."""
        failure = outcome.failure
        if failure is None:
            return ""
        sure = {one.failure.cause for one in self.outcomes if one.failure is not None}
        possible = (cause for cause in failure.maybe if cause in sure)
        return failure.cause or next(possible, failure.name)


@dataclass(frozen=True, slots=True)
class Conformance:
    """``absent``: sentences on engines that are not there."""

    version: int
    num_cases: int
    device: str
    versions: dict[str, str]
    kernels: tuple[Examined, ...]
    absent: tuple[str, ...] = ()

    @property
    def judged(self) -> int:
        """How many cases passed or failed."""
        return sum(kernel.count("pass") + kernel.count("fail") for kernel in self.kernels)

    @property
    def failed(self) -> bool:
        """Whether any kernel fails any case that it supports."""
        return any(kernel.count("fail") for kernel in self.kernels)


def examine(
    declarations: Sequence[Declaration],
    runner: Runner,
    cases: ConformanceSet,
    *,
    absent: Sequence[str] = (),
    done: Callable[[Examined], None] = lambda kernel: None,
    note: Callable[[str], None] = lambda text: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Conformance:
    """Put the set to the kernels, several of them at once, each in a process of its own. ``done`` hears of each.

    Kernels that compile themselves come after all others, one at a time: see `attnfuzz.campaign.readiness`. Once
    ``stopped`` says so, no case is judged any more: what is left is told as not run.

    Raises what ``Runner.judge`` raises, but for a case that is too large.
    """
    failed, lock = threading.Event(), threading.Lock()

    def is_over() -> bool:
        return failed.is_set() or stopped()

    def put_to(declaration: Declaration, give_up: GiveUp) -> Examined:
        if is_over():
            return Examined(declaration, tuple(_outcomes(declaration, runner, cases, is_over)))
        with runner.sibling() as own:
            own.give_up_builds(lambda builds: is_over() or give_up(builds))
            return Examined(declaration, tuple(_outcomes(declaration, own, cases, is_over)))

    def unless_it_compiles(declaration: Declaration) -> Examined | None:
        compilers = OwnCompilers()
        if declaration.needs_preparing:
            return None
        kernel = put_to(declaration, compilers)
        if compilers.seen:
            return None
        with lock:
            done(kernel)
        return kernel

    with ThreadPoolExecutor(max(1, min(len(declarations), cores(), _MOST_AT_ONCE))) as pool:
        try:
            examined = list(pool.map(unless_it_compiles, declarations))
        except BaseException:  # the other threads need not go on
            failed.set()
            raise
    for place, declaration in enumerate(declarations):
        if examined[place] is None:
            if not is_over():
                note(f"{declaration.target} compiles itself, which may take minutes")
            examined[place] = kernel = put_to(declaration, never)
            done(kernel)
    environment = runner.environment
    return Conformance(
        version=cases.version,
        num_cases=len(cases.entries),
        device=environment.name,
        versions=environment.versions,
        kernels=tuple(one for one in examined if one is not None),
        absent=tuple(absent),
    )


def _outcomes(
    declaration: Declaration, runner: Runner, cases: ConformanceSet, is_over: Callable[[], bool]
) -> Iterator[ConformanceOutcome]:
    for entry in cases.entries:
        found = translate(entry.case, declaration.problem, declaration.supports, declaration.options)
        if found is None:
            continue
        why = why_unsupported(declaration.supports, declaration.options, found.case)
        if why is None and entry.strict and (undone := [one for one in found.changes if not one.startswith("as ")]):
            why = f"runs with {', '.join(undone)} only"
        if why is not None:
            yield ConformanceOutcome(entry, found.case, "unsupported", found.changes, why=why)
            continue
        why, failure = _STOPPED, None
        try:
            if not is_over():
                verdict = _judge(declaration, runner, entry, found.case)
                why, failure = verdict.not_runnable, verdict.failure
        except DeadlinePassed:
            if not is_over():  # it is to come later
                return
        except CaseTooLarge as error:
            why = str(error)
        status: Status = "not_run" if why else "pass" if failure is None else "fail"
        yield ConformanceOutcome(entry, found.case, status, found.changes, failure=failure, why=why)


def _judge(declaration: Declaration, runner: Runner, entry: ConformanceEntry, case: Case) -> Verdict:
    """A feature's row tells of that feature: what the kernel does elsewhere in memory is asked in rows of their own."""
    relations = () if entry.law is None else oracle_of(entry.law).relations
    patience = _PATIENCE * runner.timeout_s
    return runner.judge(declaration, case, timeout_s=patience, run_twice=entry.law == TWO_RUNS, relations=relations)


def _size(outcome: ConformanceOutcome) -> tuple[int, int]:
    """Of a case, by what a reader has to take in."""
    case = outcome.case
    tokens = sum(getattr(case, "seq_lens", ())) or getattr(case, "num_tokens", 0)
    return tokens * case.num_q_heads, len(encode_case(case))
