"""Running a kernel on one case: ``attnfuzz.check``."""

from __future__ import annotations

import functools
import gc
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from attnfuzz.campaign.saved.replay import judge_sequence, preceding_for, relations_for, run_saved
from attnfuzz.cases.supported import adapt_options, why_unsupported
from attnfuzz.corpus import Regression, load_regression
from attnfuzz.corpus.regression import as_of
from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.identity.bug import is_leak
from attnfuzz.judging.guard_naming import with_name
from attnfuzz.judging.leaks import find_leak
from attnfuzz.oracles.registry import DEFAULT_ORACLES, OracleName
from attnfuzz.problems.cases import Case, Problem, case_from_builtins, case_type_of
from attnfuzz.problems.declared_numerics import Tolerance
from attnfuzz.problems.limits import check_size
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.testing.kernel_failure import kernel_failure
from attnfuzz.testing.loading import declaration_of, load_here, shared_runner
from attnfuzz.verdict import Failure, Relations, Verdict

CaseLike = Case | Mapping[str, Any] | str | Path


def check(
    kernel: Kernel | str,
    case: CaseLike,
    *,
    device: str = "auto",
    oracles: tuple[OracleName, ...] = DEFAULT_ORACLES,
    tolerance: Tolerance = "bound",
    isolated: bool = True,
    save_dir: Path | str | None = None,
) -> None:
    """Run ``kernel`` on ``case`` and raise KernelFailure if an oracle objects, relations included.

    ``kernel`` is a declared kernel or its name: a bundled name, ``module:name`` or ``path/to/file.py:name``.
    ``case`` is a Case, a dict of its fields, or the path of a regression file; options that it leaves out take their
    first choice. The cases that a regression needs before it run first, a flaky one runs several times, and one of
    a kernel that leaked is called until it shows.
    ``device`` is "auto", "cpu" or "cuda".

    The kernel runs in a process of its own, which imports its module again, so that a crash or a hang is a failure
    like any other. ``isolated=False`` runs it right here: for a kernel made inside a function, or under a debugger.
    Nothing is written unless ``save_dir`` names a folder for the regression file of a failure.

    Raises unittest.SkipTest, which pytest shows as skipped, for what Triton's interpreter cannot run.
    Raises ValueError for a case that is malformed, too large, or that the kernel does not declare to support, and
    KernelLoadError (a ValueError) for a kernel that cannot be loaded.
    """
    __tracebackhide__ = True
    check_relations(
        kernel,
        case,
        device=device,
        oracles=oracles,
        tolerance=tolerance,
        isolated=isolated,
        save_dir=save_dir,
        relations="all",
    )


def check_relations(
    kernel: Kernel | str,
    case: CaseLike,
    *,
    device: str,
    oracles: tuple[OracleName, ...],
    tolerance: Tolerance,
    isolated: bool,
    save_dir: Path | str | None,
    relations: Relations,
) -> None:
    """As ``check``, with only those ``relations`` where the case passes otherwise. Of a regression, with all."""
    __tracebackhide__ = True
    declaration = declaration_of(kernel, device=device, isolated=isolated)
    file = Path(case) if isinstance(case, str | Path) else None
    loaded = load_regression(Path(case)) if isinstance(case, str | Path) else case
    if isinstance(loaded, Regression):
        loaded = as_of(loaded, declaration.problem)
    saved = loaded if isinstance(loaded, Regression) else None
    found = _case_of(loaded, declaration)
    if isolated:
        runner = shared_runner(device, oracles, tolerance)
        verdict = run_saved(saved, declaration, runner).verdict if saved else None
        verdict = verdict or with_name(
            runner, declaration, found, runner.judge(declaration, found, relations=relations, inquire=True)
        )
    else:
        preceding = preceding_for(declaration, saved) if saved else ()
        here = functools.partial(_judge_here, kernel, device=device, oracles=oracles, tolerance=tolerance)
        last = relations_for(saved) if saved else relations

        def judge(one: Case) -> Verdict:
            return here(one, relations=last if one is found else ())

        leak = _leak_here(kernel, found, device) if saved and is_leak(saved.finding) else None
        verdict = judge_sequence(preceding, found, judge) if leak is None else Verdict(failure=leak)
    if verdict.not_runnable:
        raise unittest.SkipTest(f"{declaration.target or declaration.name}: {verdict.not_runnable}; use a GPU")
    if verdict.failure is not None:
        target = declaration.target or declaration.name
        more_than_its_case = saved is not None and (saved.preceding or is_leak(saved.finding))
        replayed_from = file if more_than_its_case else None
        raise kernel_failure(verdict.failure, target, found, save_dir=save_dir, replayed_from=replayed_from)


def _case_of(case: Case | Mapping[str, Any] | Regression, declaration: Declaration) -> Case:
    __tracebackhide__ = True
    if isinstance(case, Regression):
        found = adapt_options(case.case, declaration.options)
    else:
        found = _parsed(declaration.problem, case) if isinstance(case, Mapping) else case
        first = {name: choices[0] for name, choices in declaration.options.items()}
        found = msgspec.structs.replace(found, options={**first, **found.options})
    if found.problem != declaration.problem:
        raise ValueError(
            f"the case is one of {found.problem}, but kernel {declaration.name!r} computes {declaration.problem}; "
            "give a case of that problem"
        )
    check_size(found)
    objection = why_unsupported(declaration.supports, declaration.options, found)
    if objection is not None:
        remedy = (
            "delete the file, if the kernel is not meant for it" if isinstance(case, Regression) else "change the case"
        )
        raise ValueError(
            f"kernel {declaration.name!r} does not support this case: {objection}; {remedy}, or change the declaration"
        )
    return found


def _parsed(problem: Problem, fields: Mapping[str, Any]) -> Case:
    __tracebackhide__ = True
    try:
        return case_from_builtins(problem, dict(fields))
    except msgspec.ValidationError as error:
        about_fields = "unknown field" in str(error) or "missing required field" in str(error)
        rule = f"; a case of {problem} has {', '.join(case_type_of(problem).__struct_fields__)}" if about_fields else ""
        explained = problem.place if isinstance(problem, OpenProblem) else "attnfuzz/problems/cases.py"
        raise ValueError(f"{error}{rule} ({explained} explains the fields)") from None


def _judge_here(
    kernel: Kernel | str,
    case: Case,
    *,
    device: str,
    oracles: tuple[OracleName, ...],
    tolerance: Tolerance,
    relations: Relations,
) -> Verdict:
    from attnfuzz.judging.judge import judge

    return judge(
        _loaded(kernel),
        case,
        device=_device_here(device),
        oracles=oracles,
        tolerance=tolerance,
        relations=relations,
    )


def _leak_here(kernel: Kernel | str, case: Case, device: str) -> Failure | None:
    from attnfuzz.judging.special_runs import GrowthTrial

    trial = GrowthTrial(_loaded(kernel), case, device=_device_here(device))
    gc.freeze()  # a look collects garbage, which in a large process would take all the time that there is for looks
    try:
        return find_leak(trial.use_after)
    finally:
        gc.unfreeze()


def _loaded(kernel: Kernel | str) -> Kernel:
    """To be run in this process, whose interpreter is repaired as that of an executor is."""
    from attnfuzz.triton_compat.interpreter import set_up_interpreter

    set_up_interpreter()
    return kernel if isinstance(kernel, Kernel) else load_here(kernel)


def _device_here(device: str) -> str:
    import torch

    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
