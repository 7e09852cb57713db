"""Environments and what cases came to in them, for people and for programs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from attnfuzz.campaign.environments import Bisection, Ending, EnvironmentOutcome, name_of, told_versions
from attnfuzz.execution.pythons import Python
from attnfuzz.report.files import write_file

__all__ = [
    "BISECTION_FORMAT",
    "EnvironmentSummary",
    "OutcomeSummary",
    "environments_of",
    "outcomes_of",
    "print_environment",
    "print_outcome",
    "write_bisection",
]

BISECTION_FORMAT = "attnfuzz.bisection/1"

_STYLES: dict[Ending, tuple[str, str]] = {
    "passes": ("PASS", "green"),
    "fails": ("FAIL", "bold red"),
    "is not judged": ("skip", "yellow"),
}
_ALWAYS_TOLD = ("python", "torch", "triton", "numpy")


class EnvironmentSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where cases ran: the path of an interpreter, its device, and the versions of Python, torch, Triton and NumPy and
    of whatever else is not the same in all environments that matters to the kernels."""

    python: str
    device: str
    versions: dict[str, str]


class OutcomeSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What a case came to in the environment ``python``; ``message`` says of a failure or a case not judged more.

    It failed in ``failed`` of ``runs`` runs.
    """

    python: str
    outcome: Ending
    symptom: str = ""
    message: str = ""
    failed: int = 0
    runs: int = 1


def environments_of(
    pythons: Sequence[Python], devices: Mapping[Path, str], targets: Collection[str]
) -> tuple[EnvironmentSummary, ...]:
    """Each environment; ``devices`` by the interpreter's path, ``targets``: the kernels that ran there."""
    told = {*_ALWAYS_TOLD, *(name for target in targets for name in told_versions(pythons, target))}
    return tuple(
        EnvironmentSummary(
            python=str(python.path),
            device=devices.get(python.path, ""),
            versions={name: text for name, text in sorted(python.versions.items()) if name in told},
        )
        for python in pythons
    )


def outcomes_of(outcomes: Sequence[EnvironmentOutcome]) -> tuple[OutcomeSummary, ...]:
    """One of each environment."""
    return tuple(
        OutcomeSummary(
            python=str(one.python.path),
            outcome=one.ending,
            symptom=one.symptom,
            message=one.message,
            failed=one.failed,
            runs=one.runs,
        )
        for one in outcomes
    )


class _Bisection(msgspec.Struct, frozen=True, kw_only=True):
    """``first_failing``: the interpreter of the first environment known to fail; ``outcomes`` in their order."""

    format: str
    path: str
    kernel: str
    text: str
    first_failing: str | None
    outcomes: tuple[OutcomeSummary, ...]
    environments: tuple[EnvironmentSummary, ...]


def print_environment(console: Console, python: Python | None) -> None:
    """In which environment runs what comes next, unless it is the driver's."""
    if python is not None:
        console.print(Text(f"in {name_of(python)}", style="bold"), soft_wrap=True)


def print_outcome(console: Console, path: Path, outcome: EnvironmentOutcome) -> None:
    """One line, and for a failure what the oracle says."""
    word, style = _STYLES[outcome.ending]
    line = Text(f"{word}  ", style=style).append(str(path), style="default")
    if outcome.ending == "is not judged":
        line.append(f": {outcome.message}", style="default")
    elif outcome.runs > 1:
        line.append(f"  failed {outcome.failed} of {outcome.runs} runs", style="default")
    console.print(line, soft_wrap=True)
    if outcome.ending == "fails":
        console.print(Text(f"      {outcome.symptom}: {outcome.message}"), soft_wrap=True)


def write_bisection(path: Path, found: Bisection, case: Path) -> None:
    """Write it as indented JSON. Raises OSError."""
    outcomes = [outcome for _, outcome in sorted(found.ran.items())]
    devices = {outcome.python.path: outcome.device for outcome in outcomes}
    failing = found.first_failing
    document = _Bisection(
        format=BISECTION_FORMAT,
        path=str(case),
        kernel=found.target,
        text=str(found),
        first_failing=None if failing is None else str(failing.path),
        outcomes=outcomes_of(outcomes),
        environments=environments_of(found.pythons, devices, {found.target}),
    )
    write_file(path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
