"""The exception that a test sees when a kernel fails a case."""

from __future__ import annotations

import functools
import json
import shlex
from pathlib import Path
from typing import Any

import msgspec

from attnfuzz.campaign.saved.replay import replay_command
from attnfuzz.cases.features import features
from attnfuzz.corpus import FindingRecord, Regression, current_environment, write_regression
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.feature import words_of
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.report.findings import remedy_lines
from attnfuzz.verdict import Failure, where_to_look


class KernelFailure(AssertionError):  # noqa: N818 - what it says in a test report
    """A kernel fails a case. ``failure`` is the oracle's word, ``target`` names the kernel, ``case`` is the input."""

    __module__ = "attnfuzz"

    def __init__(self, failure: Failure, target: str, case: Case, *, replay: str) -> None:
        self.failure = failure
        self.target = target
        self.case = case
        super().__init__(failure_report(failure, target, case, replay=replay))


def kernel_failure(
    failure: Failure,
    target: str,
    case: Case,
    *,
    save_dir: Path | str | None = None,
    replayed_from: Path | None = None,
) -> KernelFailure:
    """The exception for an oracle's objection; it is saved as a regression file if ``save_dir`` names a folder.

    ``replayed_from`` is the file of a regression that is more than its case.
    """
    target = _shortened(target)
    if replayed_from is not None:
        replay = shlex.join(["attnfuzz", "replay", str(replayed_from), "--kernel", target])
    elif save_dir is None:
        call = f"attnfuzz.check({_literal(target)}, {_literal(msgspec.to_builtins(case))})"
        replay = f"python -c {shlex.quote(f'import attnfuzz; {call}')}"
    else:
        replay = replay_command(_save(failure, target, case, Path(save_dir)), target)
    return _failure_class(failure.oracle, failure.kind)(failure, target, case, replay=replay)


def failure_report(failure: Failure, target: str, case: Case, *, replay: str) -> str:
    """Lines for an engineer: what is wrong, where, on which case, and the command that shows it again."""
    lines = [
        f"{target} fails {failure.name}: {failure.message}",
        *(
            f"  {line}"
            for line in (*where_to_look(failure.sources), *failure.details, *remedy_lines(failure.remedy, case))
        ),
        f"case ({case.problem}):",
        f"  {encode_case(case).decode()}",
        "replay:",
        f"  {replay}",
    ]
    return "\n".join(lines)


def _shortened(target: str) -> str:
    """``target`` with a file's path relative to here, which is shorter to read and holds on other machines too."""
    place, separator, name = target.rpartition(":")
    here = Path.cwd()
    if place.endswith(".py") and Path(place).is_relative_to(here):
        return f"{Path(place).relative_to(here)}{separator}{name}"
    return target


def _literal(value: Any) -> str:
    """``value`` in Python, with double quotes: it goes between a shell's single ones."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(part)}" for key, part in value.items()) + "}"
    return f"[{', '.join(map(_literal, value))}]" if isinstance(value, list | tuple) else repr(value)


@functools.cache
def _failure_class(oracle: str, kind: str) -> type[KernelFailure]:
    """One class per kind of bug.

    Hypothesis takes exceptions of one class from one line for the same bug, and would shrink from one bug to another.
    """
    names = {"__module__": KernelFailure.__module__, "__doc__": f"A kernel fails {oracle} ({kind})."}
    return type("KernelFailure", (KernelFailure,), names)


def _save(failure: Failure, target: str, case: Case, folder: Path) -> Path:
    finding = FindingRecord.of(failure, words_of(features(case)))
    environment = current_environment("")
    problem = case.problem
    if isinstance(problem, OpenProblem):
        problem = msgspec.structs.replace(problem, place=_shortened(problem.place))
    regression = Regression(problem=problem, kernel=target, case=case, finding=finding, environment=environment)
    return write_regression(regression, folder)
