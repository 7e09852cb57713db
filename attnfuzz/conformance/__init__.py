"""A fixed set of cases, put to the kernels of all engines: what passes, what fails, what is not supported. Torch-free.

Each case stands for a feature of inputs, and is judged once, described in the kernel's way. The set is never changed; a
new one is a new version, and takes its place.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from attnfuzz.campaign.workers import cores
from attnfuzz.cases.supported import Translated, adapt_options, translate, why_unsupported
from attnfuzz.conformance.kept import KEPT, Kept, what_is_kept
from attnfuzz.data_files import read_data_file
from attnfuzz.declaration import Declaration
from attnfuzz.isolation.builds import GiveUp, OwnCompilers, never
from attnfuzz.isolation.outcomes import DeadlinePassed
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import DEAD_MEMORY, OracleName, oracle_of
from attnfuzz.problems.cases import Case, Problem, case_from_builtins, encode_case
from attnfuzz.problems.fields import Field
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.problems.open_cases import OpenCase, OpenProblem
from attnfuzz.verdict import Failure, Verdict

_LATEST = 4
_MOST_BYTES = 8 << 20


class ConformanceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``strict``: the case is about what translating it for a kernel would change, so it is put to kernels as it is.

    ``law``: the relation, or else the result that two runs share, that is asked of it, in place of the result alone.
    ``note``: the hash of the saved case that it is a copy of. ``about``: the field that a case of an open problem is
    about; its other fields have the kernel's own values where the kernel takes no others. ``problem``: in the file, by
    name.
    """

    group: str
    feature: str
    case: Any
    strict: bool = False
    law: OracleName | None = None
    note: str = ""
    about: str = ""
    problem: str = ""


class ConformanceSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``seed``: of the drawn cases. ``problems``: the fields of open ones, by their places."""

    format: Literal["attnfuzz.conformance-set/1"]
    version: int
    seed: int
    entries: tuple[ConformanceEntry, ...]
    problems: dict[str, dict[str, Field]]


def set_file(version: int) -> Path:
    """Where the set lies."""
    return Path(__file__).parent / f"set-{version}.json"


def load_set() -> ConformanceSet:
    """The set that comes with this version of attnfuzz."""
    read = msgspec.json.decode(read_data_file(set_file(_LATEST), _MOST_BYTES), type=ConformanceSet)
    known: dict[str, Problem] = {place: OpenProblem(place=place, fields=own) for place, own in read.problems.items()}
    entries = tuple(
        replace(one, case=case_from_builtins(known.get(one.problem, one.problem), one.case)) for one in read.entries
    )
    return replace(read, entries=entries)


Status = Literal["pass", "fail", "unsupported", "not_run"]
TWO_RUNS: OracleName = DEAD_MEMORY.name
"""The law of cases that run twice, with other numbers in memory that holds no token."""
_PATIENCE = 6.0
"""Times that of a search, whose cases are smaller."""
_FOR_THE_SET = 0.75
"""Of a kernel's time; the rest is for what it keeps to."""
_MOST_AT_ONCE = 8
"""Processes on one GPU, each with a context of its own."""
_STOPPED = "the command was stopped before"
_OUT_OF_TIME = "the time that --budget leaves for the kernel was over"


@dataclass(frozen=True, slots=True)
class ConformanceOutcome:
    """The outcome of one case of the set on one kernel.

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
    kept: tuple[Kept, ...] = ()

    def count(self, status: Status) -> int:
        """How many cases of the set came to that."""
        return sum(one.status == status for one in self.outcomes)

    @property
    def broken(self) -> tuple[ConformanceOutcome, ...]:
        """The promises that it does not keep."""
        return tuple(
            ConformanceOutcome(
                ConformanceEntry("promises", KEPT[one.name][0], one.case), one.case, "fail", failure=one.failure
            )
            for one in self.kept
            if one.status == "fail" and one.case is not None
        )

    def failing(self) -> dict[str, tuple[ConformanceOutcome, ...]]:
        """The cases that failed and the promises not kept, by cause, the smallest first."""
        failed = sorted((one for one in (*self.outcomes, *self.broken) if one.failure is not None), key=_size)
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
        """Whether any kernel fails any case that it supports, or does not keep a promise."""
        return any(kernel.count("fail") or kernel.broken for kernel in self.kernels)


def examine(
    declarations: Sequence[Declaration],
    runner: Runner,
    cases: ConformanceSet,
    *,
    absent: Sequence[str] = (),
    done: Callable[[Examined], None] = lambda kernel: None,
    note: Callable[[str], None] = lambda text: None,
    stopped: Callable[[], bool] = lambda: False,
    until: float = math.inf,
) -> Conformance:
    """Put the set to the kernels, several of them at once, each in a process of its own. ``done`` hears of each.

    Kernels that compile themselves come after all others, one at a time: see `attnfuzz.campaign.readiness`. Once
    ``stopped`` says so, no case is judged any more: what is left is told as not run. So it is with what a kernel has no
    time for: of what is left before ``until`` (of ``time.monotonic``), each has as much as all that come after it.

    Raises what ``Runner.judge`` raises, but for a case that is too large.
    """
    failed, lock = threading.Event(), threading.Lock()
    at_once = max(1, min(len(declarations), cores(), _MOST_AT_ONCE))
    left = len(declarations)

    def is_over() -> bool:
        return failed.is_set() or stopped()

    def put_to(declaration: Declaration, give_up: GiveUp, at_once: int = 1) -> Examined:
        nonlocal left
        with lock:
            now = time.monotonic()
            share = max(0.0, until - now) * min(1.0, at_once / left)

        def why_not(of: float = 1.0) -> str:
            return _STOPPED if is_over() else _OUT_OF_TIME if time.monotonic() >= now + of * share else ""

        with runner.sibling() as own:
            own.give_up_builds(lambda builds: bool(why_not()) or give_up(builds))
            found = _in_order(_outcomes(declaration, own, cases, lambda: why_not(_FOR_THE_SET)), cases)
            passed = [one.case for one in found if one.status == "pass"]
            examined = Examined(declaration, found, tuple(what_is_kept(declaration, own, passed, own.device, why_not)))
        with lock:
            left -= 1
        return examined

    def unless_it_compiles(declaration: Declaration) -> Examined | None:
        nonlocal left
        compilers = OwnCompilers()
        if declaration.needs_preparing:
            return None
        kernel = put_to(declaration, compilers, at_once)
        if compilers.seen:
            with lock:
                left += 1
            return None
        with lock:
            done(kernel)
        return kernel

    with ThreadPoolExecutor(at_once) as pool:
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
    declaration: Declaration, runner: Runner, cases: ConformanceSet, why_not: Callable[[], str]
) -> Iterator[ConformanceOutcome]:
    """The outcomes of all cases that the kernel's problem has. One that comes twice, as a field's usual value, is
    judged once."""
    known: dict[tuple[bytes, OracleName | None], Verdict] = {}
    for entry in _by_turns(cases.entries):
        try:
            found = _described(entry, declaration)
        except ValueError as error:
            yield ConformanceOutcome(entry, entry.case, "unsupported", why=str(error))
            continue
        if found is None:
            continue
        why = why_unsupported(declaration.supports, declaration.options, found.case)
        if why is None and entry.strict and (undone := [one for one in found.changes if not one.startswith("as ")]):
            why = f"runs with {', '.join(undone)} only"
        if why is not None:
            yield ConformanceOutcome(entry, found.case, "unsupported", found.changes, why=why)
            continue
        failure = None
        same = encode_case(found.case), entry.law
        try:
            if same in known or not (why := why_not()):
                verdict = known.get(same) or _judge(declaration, runner, entry, found.case)
                known[same] = verdict
                why, failure = verdict.not_runnable, verdict.failure
        except DeadlinePassed:
            if not (why := why_not()):  # it is to come later
                return
        except CaseTooLarge as error:
            why = str(error)
        status: Status = "not_run" if why else "pass" if failure is None else "fail"
        yield ConformanceOutcome(entry, found.case, status, found.changes, failure=failure, why=why)


def _by_turns(entries: Sequence[ConformanceEntry]) -> list[ConformanceEntry]:
    """First a case of the first row of each group, then of each second row; then the second cases of rows.

    So a kernel that has little time has a word on most.
    """
    rows: dict[str, dict[str, int]] = {}
    turns = []
    for entry in entries:
        of_group = rows.setdefault(entry.group, {})
        of_group[entry.feature] = of_group.get(entry.feature, 0) + 1
        turns.append((of_group[entry.feature], [*of_group].index(entry.feature)))
    return [entry for _, entry in sorted(zip(turns, entries, strict=True), key=lambda one: one[0])]


def _in_order(outcomes: Iterable[ConformanceOutcome], cases: ConformanceSet) -> tuple[ConformanceOutcome, ...]:
    places = {id(entry): place for place, entry in enumerate(cases.entries)}
    return tuple(sorted(outcomes, key=lambda one: places[id(one.entry)]))


def _described(entry: ConformanceEntry, declaration: Declaration) -> Translated | None:
    """The case in the kernel's way; None where its problem has none such.

    Raises ValueError where a kernel of an open problem does not take what the case is about.
    """
    case, problem = entry.case, declaration.problem
    if not isinstance(case, OpenCase):
        return translate(case, problem, declaration.supports, declaration.options)
    if not isinstance(problem, OpenProblem) or not problem.is_same(case.problem):
        return None
    fields: dict[str, Any] = {}
    changes: list[str] = []
    for name, field in problem.fields.items():
        fields[name] = getattr(case, name) if name in case.problem.fields else field.simplest
        try:
            field.check(name, fields[name])
        except ValueError:
            if name == entry.about:
                raise
            fields[name] = field.simplest
            changes.append(f"{name}={field.simplest}")
    return Translated(adapt_options(problem.case_type(**fields), declaration.options), tuple(changes))


def _judge(declaration: Declaration, runner: Runner, entry: ConformanceEntry, case: Case) -> Verdict:
    """A feature's row tells of that feature: what the kernel does elsewhere in memory is asked in rows of their own."""
    relations = () if entry.law is None else oracle_of(entry.law).relations
    patience = _PATIENCE * runner.timeout_s
    return runner.judge(declaration, case, timeout_s=patience, run_twice=entry.law == TWO_RUNS, relations=relations)


def _size(outcome: ConformanceOutcome) -> tuple[int, int]:
    """The size of a case, by what a reader has to take in."""
    case = outcome.case
    tokens = sum(getattr(case, "seq_lens", ())) or getattr(case, "num_tokens", 0)
    return tokens * getattr(case, "num_q_heads", 1), len(encode_case(case))
