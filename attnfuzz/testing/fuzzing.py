"""Drawing cases for a test function: ``attnfuzz.fuzz``."""

from __future__ import annotations

import functools
import inspect
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.minimise import minimise
from attnfuzz.oracles.registry import DEFAULT_ORACLES, OracleName, oracle_of
from attnfuzz.problems.cases import Case, case_number, encode_case
from attnfuzz.problems.declared_numerics import Tolerance
from attnfuzz.testing.checking import check_relations
from attnfuzz.testing.kernel_failure import KernelFailure
from attnfuzz.testing.loading import declaration_of, shared_runner
from attnfuzz.verdict import Drawn, Relations

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


TestFunction = Callable[..., object]
_SHRINKING_LIMIT_S = 60.0
_TURN_ONE_IN = 16
"""Cases of which one asks a costly relation on a GPU: six of a hundred, at 0.1 to 0.9 s each."""


def fuzz(
    kernel: Kernel | str,
    *,
    max_examples: int = 100,
    device: str = "auto",
    oracles: tuple[OracleName, ...] = DEFAULT_ORACLES,
    tolerance: Tolerance = "bound",
    isolated: bool = True,
    save_dir: Path | str | None = None,
) -> Callable[[TestFunction], Callable[..., None]]:
    """Check ``kernel`` on ``max_examples`` cases drawn by Hypothesis; of each bug, the smallest case found is raised.

    Decorates a test function without arguments, or with one named ``case``, which runs after each case that passed.
    Hypothesis's own decorators (``@example(case=...)``, ``@settings(...)``) can be put on top. The other arguments are
    those of ``check``. Raises ValueError for a kernel that cannot be checked.
    """
    if isinstance(kernel, Kernel):
        declaration_of(kernel, device=device, isolated=isolated)  # a kernel that cannot be loaded is told at once
    settings = {"device": device, "oracles": oracles, "tolerance": tolerance, "isolated": isolated}

    def decorate(test: TestFunction) -> Callable[..., None]:
        checked = _CheckedTest(kernel, test, settings, save_dir)

        @functools.wraps(test)
        def run(*instance: object, case: Case) -> None:
            __tracebackhide__ = True
            checked.run(case, instance)

        run.__signature__ = _signature_with_case(test)  # type: ignore[attr-defined]  # what inspect.signature reads
        return _given(checked.cases(), max_examples)(run)

    return decorate


class _CheckedTest:
    """A kernel and a test of it, and for each failing case the smallest one that fails alike."""

    def __init__(
        self, kernel: Kernel | str, test: TestFunction, settings: dict[str, Any], save_dir: Path | str | None
    ) -> None:
        self._kernel = kernel
        self._test = test
        self._settings = settings
        self._save_dir = save_dir
        self._wants_case = _wants_case(test)
        self._failing: dict[bytes, tuple[Case, AssertionError]] = {}

    def run(self, case: Case, instance: tuple[object, ...]) -> None:
        """Raises the failure of the smallest case that fails as ``case`` does."""
        __tracebackhide__ = True
        key = encode_case(case)
        if key not in self._failing:
            try:
                return self._once(case, instance, relations=self._turn_of(case))
            except AssertionError as error:  # KernelFailure is one
                self._failing[key] = self._smallest(case, error, instance), error
        smallest, failure = self._failing[key]
        self._once(smallest, instance, relations=_relations_of(failure), save_dir=self._save_dir)
        raise failure  # the smallest case no longer fails: show the one that was drawn

    def cases(self) -> SearchStrategy[Case]:
        """A strategy for cases that the kernel supports. A kernel known by name is loaded at the first draw."""
        from hypothesis import strategies as st

        from attnfuzz.strategies import CPU_SIZES, GPU_SIZES, cases

        def drawn() -> SearchStrategy[Case]:
            declaration = self._declaration()
            sizes = GPU_SIZES if self._device() == "cuda" else CPU_SIZES
            return cases(declaration.problem, supports=declaration.supports, options=declaration.options, sizes=sizes)

        return st.deferred(drawn)

    def _device(self) -> str:
        return shared_runner(self._settings["device"]).device if self._settings["isolated"] else "cpu"

    def _turn_of(self, case: Case) -> Relations:
        """The relations that `case` draws; one in so many on a GPU asks a costly relation, to which a campaign gives
        time of its own.

        By chance tens of thousands of cases would be drawn for one, and a test has hundreds.
        """
        turn, rest = divmod(case_number(case), _TURN_ONE_IN)
        return Drawn(turn=turn) if rest == 0 and self._device() == "cuda" else None

    def _declaration(self) -> Declaration:
        return declaration_of(self._kernel, device=self._settings["device"], isolated=self._settings["isolated"])

    def _once(
        self,
        case: Case,
        instance: tuple[object, ...],
        *,
        relations: Relations = None,
        save_dir: Path | str | None = None,
    ) -> None:
        __tracebackhide__ = True
        try:
            check_relations(self._kernel, case, save_dir=save_dir, relations=relations, **self._settings)
        except unittest.SkipTest:  # this case cannot run here; others may
            from hypothesis import reject

            reject()
        self._test(*instance, **({"case": case} if self._wants_case else {}))

    def _smallest(self, case: Case, error: AssertionError, instance: tuple[object, ...]) -> Case:
        """Failures are alike if they are of one class; those of kernels have one for each kind of bug."""

        relations = _relations_of(error)

        def fails_alike(candidate: Case) -> bool:
            try:
                self._once(candidate, instance, relations=relations)
            except Exception as other:  # noqa: BLE001 - whatever else a smaller case raises is another failure
                return type(other) is type(error)
            return False

        declaration = self._declaration()
        return minimise(
            case,
            fails_alike,
            supports=declaration.supports,
            options=declaration.options,
            deadline=time.monotonic() + _SHRINKING_LIMIT_S,
        )


def _relations_of(error: AssertionError) -> Relations:
    """The relations that show the failure again: its own; all of them if the process died, which may have been in
    any."""
    if not isinstance(error, KernelFailure):
        return ()
    oracle = oracle_of(error.failure.oracle)
    return "all" if oracle.ends_process else oracle.relations


def _given(strategy: SearchStrategy[Case], max_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    from hypothesis import HealthCheck, Phase, Verbosity, given, settings

    limits = settings(
        max_examples=max_examples,
        deadline=None,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),  # no shrinking: minimise knows what a case means
        suppress_health_check=[HealthCheck.too_slow],  # the first draw may wait until a kernel is loaded
        verbosity=Verbosity.quiet,  # how Hypothesis made a case is no use to a reader
    )
    return lambda function: limits(given(case=strategy)(function))


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
