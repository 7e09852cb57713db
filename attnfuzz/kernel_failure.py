"""What a test sees when a kernel fails a case."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path

import msgspec

from attnfuzz.corpus import FindingRecord, Regression, current_environment, write_regression
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.features import features

__all__ = ["KernelFailure", "failure_report", "kernel_failure"]


class KernelFailure(AssertionError):  # noqa: N818 - what it says in a test report
    """A kernel fails a case. ``failure`` is the oracle's word, ``target`` names the kernel, ``case`` is the input."""

    __module__ = "attnfuzz"

    def __init__(self, failure: Failure, target: str, case: Case, *, replay: str) -> None:
        self.failure = failure
        self.target = target
        self.case = case
        super().__init__(failure_report(failure, target, case, replay=replay))


def kernel_failure(failure: Failure, target: str, case: Case, *, save_dir: Path | str | None = None) -> KernelFailure:
    """The exception for an oracle's objection; it is saved as a regression file if ``save_dir`` names a folder."""
    if save_dir is None:
        script = f"import attnfuzz; attnfuzz.check({target!r}, {msgspec.to_builtins(case)!r})"
        replay = f"python -c {shlex.quote(script)}"
    else:
        replay = f"attnfuzz replay {shlex.quote(str(_save(failure, target, case, Path(save_dir))))}"
    return _failure_class(failure.oracle, failure.kind)(failure, target, case, replay=replay)


def failure_report(failure: Failure, target: str, case: Case, *, replay: str) -> str:
    """Lines for an engineer: what is wrong, where, on which case, and the command that shows it again."""
    lines = [
        f"{target} fails {failure.oracle} ({failure.kind}): {failure.message}",
        *(f"  {line}" for line in failure.details),
        f"case ({case.problem}):",
        f"  {encode_case(case).decode()}",
        "replay:",
        f"  {replay}",
    ]
    return "\n".join(lines)


@functools.cache
def _failure_class(oracle: str, kind: str) -> type[KernelFailure]:
    """One class per kind of bug.

    Hypothesis takes exceptions of one class from one line for the same bug, and would shrink from one bug to another.
    """
    names = {"__module__": KernelFailure.__module__, "__doc__": f"A kernel fails {oracle} ({kind})."}
    return type("KernelFailure", (KernelFailure,), names)


def _save(failure: Failure, target: str, case: Case, folder: Path) -> Path:
    finding = FindingRecord.of(failure, features(case))
    environment = current_environment("")
    regression = Regression(problem=case.problem, kernel=target, case=case, finding=finding, environment=environment)
    return write_regression(regression, folder)
