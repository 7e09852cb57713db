"""Saved cases run again: each on the kernel it names, on others in its place, or on others beside it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from attnfuzz.campaign.inference import with_declared
from attnfuzz.campaign.journal import is_in_journal, was_running
from attnfuzz.campaign.saved_run import SavedRun, run_saved
from attnfuzz.corpus import Regression
from attnfuzz.corpus.regression import as_of
from attnfuzz.data_files import is_regular_file
from attnfuzz.declaration import Declaration, KernelLoadError, parts_of
from attnfuzz.execution.builds import OwnCompilers, never
from attnfuzz.execution.outcomes import DeadlinePassed
from attnfuzz.execution.pythons import Python
from attnfuzz.execution.runner import Runner
from attnfuzz.oracles.verdict import Verdict
from attnfuzz.problems.cases import Case
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.supported import adapt_options, translate, why_unsupported
from attnfuzz.problems.supports import Supports
from attnfuzz.project import project_root, why_foreign

__all__ = [
    "Replayed",
    "SavedCase",
    "cleared",
    "kernel_and_case",
    "load_named",
    "replay",
    "replay_command",
    "resolve_target",
]

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
    of the case had to be described in another way for this kernel (see `attnfuzz.problems.supported.translate`).

    A flaky case has ``runs`` > 1, of which ``failed_runs`` failed; ``verdict`` is that of one that did, if any.
    ``python`` and ``device``: where it ran, if not in the driver's environment.
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

    @property
    def failed(self) -> bool:
        """Whether an oracle objected."""
        return self.verdict is not None and self.verdict.failure is not None


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
        return _replay_on(self.declaration, self.case, runner, run, is_own=self.is_own)

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
    """What to type to run a saved case of the kernel ``target`` again from here, in the environment ``python``."""
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


def _replay_on(declaration: Declaration, saved: SavedCase, runner: Runner, run: Run, *, is_own: bool) -> Replayed:
    case = adapt_options(saved.regression.case, declaration.options)
    objection = why_unsupported(declaration.supports, declaration.options, case)
    if objection is not None:
        return Replayed(saved, declaration, case, None, objection, is_own=is_own)
    ran = run(saved.regression, declaration, runner)
    if ran.verdict.not_runnable:
        return Replayed(saved, declaration, case, None, ran.verdict.not_runnable, is_own=is_own)
    return Replayed(saved, declaration, case, ran.verdict, runs=ran.runs, failed_runs=ran.failed, is_own=is_own)


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
