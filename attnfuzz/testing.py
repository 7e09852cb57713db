"""Checking a kernel in a test suite: ``check`` runs one case, ``fuzz`` draws cases for a test function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from attnfuzz.corpus import load_regression
from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.kernel_failure import KernelFailure, kernel_failure
from attnfuzz.oracles.verdict import DEFAULT_ORACLES, OracleName, Verdict
from attnfuzz.problems.cases import Case, case_from_builtins
from attnfuzz.problems.limits import check_size
from attnfuzz.problems.supported import adapt_options, why_unsupported
from attnfuzz.problems.tolerance import Tolerance
from attnfuzz.shared_runner import shared_runner
from attnfuzz.targets import declaration_of, load_here

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["KernelFailure", "check", "fuzz"]

CaseLike = Case | Mapping[str, Any] | str | Path
TestFunction = Callable[..., object]
_Test = TypeVar("_Test", bound=TestFunction)


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
    """Run ``kernel`` on ``case`` and raise KernelFailure if an oracle objects.

    ``kernel`` is a declared kernel or its name: a bundled name, ``module:name`` or ``path/to/file.py:name``.
    ``case`` is a Case, a dict of its fields, or the path of a regression file; options that it leaves out take their
    first choice. ``device`` is "auto", "cpu" or "cuda".

    The kernel runs in a process of its own, which imports its module again, so that a crash or a hang is a failure
    like any other. ``isolated=False`` runs it right here: for a kernel made inside a function, or under a debugger.
    Nothing is written unless ``save_dir`` names a folder for the regression file of a failure.

    Raises ValueError for a case that is malformed, too large, or that the kernel does not declare to support, and
    KernelLoadError (a ValueError) for a kernel that cannot be loaded.
    """
    __tracebackhide__ = True
    declaration = declaration_of(kernel, device=device, isolated=isolated)
    found = _case_of(case, declaration)
    if isolated:
        verdict = shared_runner(device, oracles, tolerance).judge(declaration, found)
    else:
        verdict = _judge_here(kernel, found, device=device, oracles=oracles, tolerance=tolerance)
    if verdict.failure is not None:
        raise kernel_failure(verdict.failure, declaration.target or declaration.name, found, save_dir=save_dir)


def fuzz(
    kernel: Kernel | str,
    *,
    max_examples: int = 100,
    device: str = "auto",
    oracles: tuple[OracleName, ...] = DEFAULT_ORACLES,
    tolerance: Tolerance = "bound",
    isolated: bool = True,
    save_dir: Path | str | None = None,
) -> Callable[[_Test], Callable[..., None]]:
    """Check ``kernel`` on ``max_examples`` cases drawn by Hypothesis, and shrink what fails.

    Decorates a test function without arguments, or with one named ``case``, which runs after each case that passed.
    Hypothesis's own decorators (``@example(case=...)``, ``@settings(...)``) can be put on top. The other arguments are
    those of ``check``; with ``save_dir`` every failing case is saved, those on the way to the smallest included.
    """
    if isinstance(kernel, Kernel):
        declaration_of(kernel, device=device, isolated=isolated)  # a kernel that cannot be loaded is told at once

    def decorate(test: _Test) -> Callable[..., None]:
        from hypothesis import HealthCheck, given, settings

        wants_case = _wants_case(test)

        @functools.wraps(test)
        def run(*instance: object, case: Case) -> None:
            __tracebackhide__ = True
            check(
                kernel, case, device=device, oracles=oracles, tolerance=tolerance, isolated=isolated, save_dir=save_dir
            )
            test(*instance, **({"case": case} if wants_case else {}))

        run.__signature__ = _signature_with_case(test)  # type: ignore[attr-defined]  # what inspect.signature reads
        # The first draw may wait until an executor has loaded the kernel.
        limits = settings(max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        return limits(given(case=_drawn_cases(kernel, device=device, isolated=isolated))(run))

    return decorate


def _case_of(case: CaseLike, declaration: Declaration) -> Case:
    if isinstance(case, str | Path):
        found = adapt_options(load_regression(Path(case)).case, declaration.options)
    else:
        found = case_from_builtins(declaration.problem, dict(case)) if isinstance(case, Mapping) else case
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
        raise ValueError(
            f"kernel {declaration.name!r} does not support this case: {objection}; change the case or the declaration"
        )
    return found


def _judge_here(
    kernel: Kernel | str, case: Case, *, device: str, oracles: tuple[OracleName, ...], tolerance: Tolerance
) -> Verdict:
    import torch

    from attnfuzz.oracles.judge import judge

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = kernel if isinstance(kernel, Kernel) else load_here(kernel)
    return judge(loaded, case, device=device, oracles=oracles, tolerance=tolerance)


def _wants_case(test: TestFunction) -> bool:
    names = [name for name in inspect.signature(test).parameters if name != "self"]
    if names not in ([], ["case"]):
        raise TypeError(
            f"test {getattr(test, '__name__', test)!r} takes {', '.join(names)}; under @attnfuzz.fuzz it can take "
            "nothing, or one argument named case"
        )
    return bool(names)


def _signature_with_case(test: TestFunction) -> inspect.Signature:
    parameters = [one for one in inspect.signature(test).parameters.values() if one.name != "case"]
    return inspect.Signature([*parameters, inspect.Parameter("case", inspect.Parameter.KEYWORD_ONLY)])


def _drawn_cases(kernel: Kernel | str, *, device: str, isolated: bool) -> SearchStrategy[Case]:
    from hypothesis import strategies as st

    from attnfuzz.strategies.cases import cases

    def drawn() -> SearchStrategy[Case]:
        declaration = declaration_of(kernel, device=device, isolated=isolated)
        return cases(declaration.problem, supports=declaration.supports, options=declaration.options)

    return st.deferred(drawn)  # a kernel known by name is loaded by the first test that needs it, not at import
