"""Saved cases run again as they failed: each on the kernel it names, on others in its place, or beside it.

A case runs after the cases that it needs, and as often as its rate asks for.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from attnfuzz.campaign.declaration_inference import with_declared
from attnfuzz.campaign.judge.journal import is_in_journal, was_running
from attnfuzz.campaign.judge.process_memory import memory_limit
from attnfuzz.cases.supported import adapt_options, supports_case, translate, why_unsupported
from attnfuzz.corpus import Regression
from attnfuzz.corpus.regression import as_of
from attnfuzz.data_files import is_regular_file
from attnfuzz.declaration import Declaration, KernelLoadError, parts_of
from attnfuzz.identity.bug import is_leak
from attnfuzz.isolation.builds import OwnCompilers, never
from attnfuzz.isolation.outcomes import DeadlinePassed
from attnfuzz.isolation.pythons import Python
from attnfuzz.judging.guard_naming import with_name
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import CALL_SEQUENCE, CRASH, HANG, oracle_of
from attnfuzz.problems.cases import Case
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.supports import Supports
from attnfuzz.project import project_root, why_foreign
from attnfuzz.verdict import Relations, Verdict, ends_process

_MISSED = 0.05
_MOST_RUNS = 60


@dataclass(frozen=True, slots=True)
class SavedRun:
    """``verdict`` is that of the first of ``runs`` runs that failed, or of the last one; ``failed`` of them failed."""

    verdict: Verdict
    failed: int
    runs: int


def run_saved(regression: Regression, declaration: Declaration, runner: Runner) -> SavedRun:
    """Put the regression to a kernel that supports its case.

    With preceding cases, each run is in a fresh process, and so it is where the finding is about other calls. A flaky
    case runs several times, and one of a kernel that leaked so often that it shows. What passes otherwise is judged by
    relations: see ``relations_for``.
    Where a process outgrew its memory, there is a limit to it again.
    What an oracle has found that the kernel's file does not define is not judged.
    Raises what ``Runner.judge`` raises.
    """
    if why := _unknown_oracle(regression, declaration):
        return SavedRun(Verdict(not_runnable=why), 0, 1)
    case = adapt_options(regression.case, declaration.options)
    preceding = preceding_for(declaration, regression)
    runs = runs_to_see(regression.finding.failed, regression.finding.runs)
    with _limited(regression, runner) as limited:
        verdicts = [_once(case, preceding, declaration, limited, regression) for _ in range(runs)]
    failing = [verdict for verdict in verdicts if verdict.failure is not None]
    verdict = (failing or verdicts[-1:])[0]
    if not preceding:
        verdict = with_name(runner, declaration, case, verdict)
    return SavedRun(verdict, len(failing), runs)


def _unknown_oracle(regression: Regression, declaration: Declaration) -> str:
    """Why nobody can say what the finding's oracle says now; empty where somebody can."""
    oracle = oracle_of(regression.finding.oracle)
    if not oracle.is_own or oracle.name in declaration.oracles:
        return ""
    return (
        f"no oracle is called {oracle.name!r}: neither attnfuzz nor the file of {declaration.target} has one of that "
        "name; define it there, or correct the name in the saved case"
    )


def preceding_for(declaration: Declaration, regression: Regression) -> tuple[Case, ...]:
    """The regression's preceding cases as the kernel can run them."""
    adapted = (adapt_options(case, declaration.options) for case in regression.preceding)
    return tuple(case for case in adapted if supports_case(declaration.supports, declaration.options, case))


def relations_for(regression: Regression) -> Relations:
    """The relation that the finding is of, or all; none for a hang, and where certain cases and no others go before."""
    oracle = oracle_of(regression.finding.oracle)
    return oracle.relations or (() if regression.preceding or oracle is HANG else "all")


def runs_to_see(failed: int, runs: int) -> int:
    """How many runs show a failure with this rate with a probability of 95 %; 1 for one that always fails."""
    if not 0 < failed < runs:
        return 1
    return min(_MOST_RUNS, math.ceil(math.log(_MISSED) / math.log(1 - failed / runs)))


def judge_sequence(preceding: Sequence[Case], case: Case, judge: Callable[[Case], Verdict]) -> Verdict:
    """The verdict on ``case`` after ``preceding``; on the first of those that fails if ``case`` does not.

    ``judge`` runs all of them in one process; a case that ends it is the last.
    """
    earlier: Verdict | None = None
    for number, one in enumerate(preceding, start=1):
        verdict = judge(one)
        if verdict.failure is None:
            continue
        where = f"in case {number} of the {len(preceding)} that precede it"
        failure = msgspec.structs.replace(verdict.failure, details=(*verdict.failure.details, where))
        verdict = msgspec.structs.replace(verdict, failure=failure)
        if verdict.fatal or ends_process(failure):
            return verdict
        earlier = earlier or verdict
    last = judge(case)
    return last if last.failure is not None or earlier is None else earlier


def _once(
    case: Case, preceding: Sequence[Case], declaration: Declaration, runner: Runner, regression: Regression
) -> Verdict:
    if is_leak(regression.finding) and (leak := runner.find_leak(declaration, case)) is not None:
        return Verdict(failure=leak)  # a kernel that does not leak any more may still fail in another way
    relations = relations_for(regression)
    if not preceding and relations != CALL_SEQUENCE.relations:
        return runner.judge(declaration, case, relations=relations, inquire=True)

    def judge(one: Case) -> Verdict:
        return fresh.judge(declaration, one, relations=relations if one is case else (), inquire=one is case)

    with runner.sibling() as fresh:
        return judge_sequence(preceding, case, judge)


@contextmanager
def _limited(regression: Regression, runner: Runner) -> Iterator[Runner]:
    """``runner``, or for a death of memory one whose executors have as much of it as those of a campaign."""
    if (regression.finding.oracle, regression.finding.kind) != (CRASH.name, "memory"):
        yield runner
        return
    limit = memory_limit(runner.resident_bytes, device=runner.device, workers=1)
    with runner.sibling(memory_limit_bytes=limit) as limited:
        yield limited


Run = Callable[[Regression, Declaration, Runner], SavedRun]


@dataclass(frozen=True, slots=True)
class SavedCase:
    """A regression and the file it was read from."""

    path: Path
    regression: Regression


@dataclass(frozen=True, slots=True)
class Replayed:
    """One case on one kernel; ``verdict`` is None where it was not judged, as ``objection`` says: the kernel does not
    support it, or cannot run it here.

    ``is_own``: whether it is the kernel that the file names. What others do says nothing of that one. ``changes``: what
    of the case had to be described in another way for this kernel (see `attnfuzz.cases.supported.translate`).

    A flaky case has ``runs`` > 1, of which ``failed_runs`` failed; ``verdict`` is that of one that did, if any.
    ``python`` and ``device``: where it ran, if not in the driver's environment. ``is_missed``: the kernel should run
    the case, and cannot here.
    """

    saved: SavedCase
    kernel: Declaration
    case: Case
    verdict: Verdict | None
    objection: str | None = None
    runs: int = 1
    failed_runs: int = 0
    is_own: bool = True
    changes: tuple[str, ...] = ()
    python: Python | None = None
    device: str = ""
    is_missed: bool = False

    @property
    def failed(self) -> bool:
        """Whether an oracle objected."""
        return self.verdict is not None and self.verdict.failure is not None

    @property
    def is_unexpected(self) -> bool:
        """Whether it came to something else than the status of its file says: an open case fails, all else passes.

        An open one that passes says nothing where it may do so by chance: it is flaky, its oracle has no say
        everywhere, or it was found on another device.
        """
        regression = self.saved.regression
        if regression.status != "open" or not self.is_own or was_running(regression):
            return self.failed
        found_on = regression.environment.device
        by_chance = regression.finding.is_flaky or not oracle_of(regression.finding.oracle).judges_everywhere
        return self.verdict is not None and not self.failed and not by_chance and found_on in ("", self.device)


def replay(
    cases: Sequence[SavedCase],
    runner: Runner,
    *,
    kernels: Sequence[str] = (),
    on: Sequence[str] = (),
    trust: bool = False,
    run: Run = run_saved,
) -> Iterator[Replayed]:
    """Run each case on its own kernel, or only on ``kernels``; and, translated, on those of ``on`` that support it.

    ``trust``: see `load_named`. ``run`` puts a regression to a kernel that supports its case. Every kernel is loaded
    before the first case runs. What a kernel has to compile itself for comes after all else (see
    `attnfuzz.campaign.readiness`). Raises KernelLoadError with a sentence for each file whose kernel cannot be.
    """
    later: list[_Job] = []
    for job in _jobs(cases, runner, kernels=kernels, on=on, trust=trust):
        runner.give_up_builds(OwnCompilers())
        try:
            result = None if job.declaration.needs_preparing else job.run(runner, run)
        except DeadlinePassed:
            result = None
        finally:
            runner.give_up_builds(never)
        if result is None:
            later.append(job)
        else:
            yield from job.told(result)
    for job in later:
        yield from job.told(job.run(runner, run))


@dataclass(frozen=True, slots=True)
class _Job:
    """A case to be run on a kernel. ``changes``: how it was translated for that; None if it is as it was saved."""

    declaration: Declaration
    saved: SavedCase
    case: SavedCase
    is_own: bool
    changes: tuple[str, ...] | None = None

    def run(self, runner: Runner, run: Run) -> Replayed:
        kernel, saved = self.declaration, self.case
        case = adapt_options(saved.regression.case, kernel.options)
        if (objection := why_unsupported(kernel.supports, kernel.options, case)) is not None:
            return Replayed(saved, kernel, case, None, objection, is_own=self.is_own)
        ran = run(saved.regression, kernel, runner)
        if why := ran.verdict.not_runnable:
            missed = self.changes is None  # a kernel of --on is one more, as far as it goes
            return Replayed(saved, kernel, case, None, why, is_own=self.is_own, is_missed=missed)
        return Replayed(saved, kernel, case, ran.verdict, runs=ran.runs, failed_runs=ran.failed, is_own=self.is_own)

    def told(self, result: Replayed) -> Iterator[Replayed]:
        """Bundled kernels are many: of those that do not take a translated case nothing is said."""
        if self.changes is None:
            yield result
        elif result.verdict is not None or ":" in self.declaration.target:
            yield replace(result, saved=self.saved, changes=self.changes)


def _jobs(
    cases: Sequence[SavedCase], runner: Runner, *, kernels: Sequence[str], on: Sequence[str], trust: bool
) -> Iterator[_Job]:
    chosen = runner.declarations(kernels) if kernels else []
    others = runner.declarations(on) if on else []
    own = [None] * len(cases) if kernels else _own_kernels(cases, runner, trust=trust)
    for saved, first in zip(cases, own, strict=True):
        judged = [_as_assumed(one, saved) if _is_namesake(one, saved) else one for one in chosen]
        strictly = _distinct([first] if first else judged)
        for declaration in strictly:
            now = _as_of(saved, declaration)
            if declaration.problem == now.regression.problem:
                is_own = declaration is first or (first is None and _is_named(declaration.target, saved))
                yield _Job(declaration, now, now, is_own)
        done = {declaration.target for declaration in strictly}
        for declaration in _distinct(others):
            if declaration.target not in done and (translated := _translated(saved, declaration)) is not None:
                other, changes = translated
                yield _Job(declaration, saved, other, is_own=False, changes=changes)


def cleared(results: Iterable[Replayed]) -> set[Path]:
    """Files in journals, of cases that were running when a campaign was killed and pass wherever they were run."""
    ran = [result for result in results if result.verdict is not None and was_running(result.saved.regression)]
    passed = {result.saved.path for result in ran} - {result.saved.path for result in ran if result.failed}
    return set(filter(is_in_journal, passed))


def load_named(saved: SavedCase, runner: Runner, *, trust: bool = False, start: Path | None = None) -> Declaration:
    """The kernel that the file of a saved case names: the only way on which such a name comes to be imported.

    A file is anybody's. So its kernel must be bundled or lie in the project that the folder ``start`` belongs to, by
    default the working directory, unless ``trust`` says that the user has looked. Raises KernelLoadError.
    """
    root = project_root(saved.path.resolve().parent if trust and start is None else start)
    target = resolve_target(saved.regression.kernel, saved.path, root)
    try:
        (declaration, *_) = runner.declarations([target], within=None if trust else root)
    except KernelLoadError as error:
        raise KernelLoadError(f"{saved.path}: {error}; name another kernel with --kernel") from error
    return _as_assumed(declaration, saved)


def replay_command(file: Path, target: str, python: Python | None = None) -> str:
    """The command to run a saved case of the kernel ``target`` again from here, in the environment ``python``."""
    place = target.rpartition(":")[0]
    try:
        is_foreign = place.endswith(".py") and why_foreign(Path(place), project_root()) is not None
    except FileNotFoundError:  # the working directory has been removed; the user will type it elsewhere
        is_foreign = True
    where = [] if python is None else ["--python", str(python.path)]
    return shlex.join(["attnfuzz", "replay", str(file), *(["--kernel", target] if is_foreign else []), *where])


def kernel_and_case(saved: SavedCase, runner: Runner, *, kernel: str | None, trust: bool) -> tuple[Declaration, Case]:
    """The ``kernel`` that the user names, or else the file, and the case with its options. Raises KernelLoadError."""
    declaration = runner.declarations([kernel])[0] if kernel else load_named(saved, runner, trust=trust)
    if _is_namesake(declaration, saved):
        declaration = _as_assumed(declaration, saved)
    _check_problem(saved, declaration)
    return declaration, adapt_options(_as_of(saved, declaration).regression.case, declaration.options)


def resolve_target(target: str, regression_file: Path, root: Path) -> str:
    """``target`` with a relative file found from here, or else from a folder above the regression file, or ``root``.

    No folder above ``root`` is looked into. Raises KernelLoadError for a file that is nowhere.
    """
    if (parts := parts_of(target)) is not None:
        return "+".join(resolve_target(part, regression_file, root) for part in parts)
    place, separator, name = target.rpartition(":") if not target.endswith(".py") else (target, "", "")
    if not place.endswith(".py") or is_regular_file(Path(place)):
        return target
    above = [folder for folder in regression_file.resolve().parents if folder.is_relative_to(root)]
    for folder in (*above, root):
        if is_regular_file(folder / place):
            return f"{folder / place}{separator}{name}"
    raise KernelLoadError(
        f"{regression_file} names the kernel {target!r}, but there is no file {place!r} here or above the regression "
        f"in the project {root}; run from the folder it is relative to, or name another kernel with --kernel"
    )


def _as_assumed(declaration: Declaration, saved: SavedCase) -> Declaration:
    """The kernel by the contract that the finding was made in."""
    regression = saved.regression
    if regression.assumed is None and regression.assumed_numerics is None:
        return declaration
    return with_declared(declaration, regression.assumed or Supports(), regression.assumed_numerics or Numerics())


def _is_namesake(declaration: Declaration, saved: SavedCase) -> bool:
    """Whether it is the kernel that the file names or a copy of it, which means the same contract."""
    return Path(declaration.target).name == Path(saved.regression.kernel).name


def _own_kernels(cases: Iterable[SavedCase], runner: Runner, *, trust: bool) -> list[Declaration]:
    own, wrong = [], []
    for saved in cases:
        try:
            own.append(load_named(saved, runner, trust=trust))
            _check_problem(saved, own[-1])
        except KernelLoadError as error:
            wrong.append(str(error))
    if wrong:
        raise KernelLoadError("\n".join(wrong))
    return own


def _is_named(target: str, saved: SavedCase) -> bool:
    """Whether ``target`` is the kernel that the file of a saved case names, perhaps by another path."""
    place, _, name = target.rpartition(":")
    try:
        own = resolve_target(saved.regression.kernel, saved.path, project_root())
    except KernelLoadError:  # its file has moved
        return False
    own_place, _, own_name = own.rpartition(":")
    same_file = (
        place.endswith(".py") and own_place.endswith(".py") and Path(place).resolve() == Path(own_place).resolve()
    )
    return target == own or (same_file and name == own_name)


def _as_of(saved: SavedCase, declaration: Declaration) -> SavedCase:
    """The saved case by what its problem says by now. Raises KernelLoadError where that has no such case any more."""
    try:
        return replace(saved, regression=as_of(saved.regression, declaration.problem))
    except ValueError as error:
        raise KernelLoadError(
            f"{saved.path} is a case of {saved.regression.problem} as it was when that was saved: {error}; "
            "correct the case or remove the file"
        ) from error


def _check_problem(saved: SavedCase, declaration: Declaration) -> None:
    if declaration.problem != _as_of(saved, declaration).regression.problem:
        raise KernelLoadError(
            f"{saved.path} is a case of {saved.regression.problem}, but kernel {declaration.target!r} computes "
            f"{declaration.problem}; name another kernel with --kernel"
        )


def _distinct(declarations: Iterable[Declaration]) -> list[Declaration]:
    return list({declaration.target: declaration for declaration in declarations}.values())


def _translated(saved: SavedCase, declaration: Declaration) -> tuple[SavedCase, tuple[str, ...]] | None:
    """The saved case as one of the kernel's problem, and what was changed; None where the problem has none."""
    supports, options, regression = declaration.supports, declaration.options, saved.regression
    found = translate(regression.case, declaration.problem, supports, options)
    if found is None:
        return None
    before = [translate(case, declaration.problem, supports, options) for case in regression.preceding]
    preceding = tuple(one.case for one in before if one is not None)
    other = msgspec.structs.replace(regression, problem=declaration.problem, case=found.case, preceding=preceding)
    return replace(saved, regression=other), found.changes
