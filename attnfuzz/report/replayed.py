"""The results of ``attnfuzz replay`` for people and for programs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from attnfuzz.campaign.across import Difference, differences
from attnfuzz.campaign.journal import was_running
from attnfuzz.campaign.replay import Replayed, SavedCase
from attnfuzz.oracles.verdict import NOT_EVERYWHERE
from attnfuzz.report.environments import EnvironmentSummary, OutcomeSummary, environments_of, outcomes_of
from attnfuzz.report.headline import count, remedy_lines

__all__ = ["FORMAT", "print_replayed", "print_total", "write_replayed"]

FORMAT = "attnfuzz.replay/1"

_STATUSES = {"open": "still open", "fixed": "marked fixed", "running": "of a killed campaign"}


class _Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A case that came to something else in one environment than in another."""

    path: str
    kernel: str
    text: str
    outcomes: tuple[OutcomeSummary, ...]


class _Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``python``: the environment that it is of, where any are named."""

    path: str
    status: str
    problem: str
    kernel: str
    outcome: str
    oracle: str | None
    message: str | None
    runs: int
    failed_runs: int
    changes: tuple[str, ...] = ()
    python: str = ""


class _Document(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    format: str
    device: str
    failed: int
    results: tuple[_Result, ...]
    environments: tuple[EnvironmentSummary, ...] = ()
    differences: tuple[_Difference, ...] = ()


def print_replayed(console: Console, result: Replayed) -> None:
    """One line, and for a failure what the oracle says."""
    style = {"PASS": "green", "FAIL": "bold red", "skip": "yellow"}
    line = Text(f"{_outcome(result)}  ", style=style[_outcome(result)])
    line.append(f"{result.saved.path}  {result.kernel.target}", style="default")
    line.append("".join(_remarks(result)), style="default")
    console.print(line, soft_wrap=True)
    failure = result.verdict.failure if result.verdict is not None else None
    if failure is not None:
        remedy = remedy_lines(failure.remedy, result.saved.regression.case)
        for text in (f"{failure.oracle}/{failure.kind}: {failure.message}", *failure.details, *remedy):
            console.print(Text(f"      {text}"), soft_wrap=True)


def print_total(
    console: Console, saved: Sequence[SavedCase], results: Sequence[Replayed], *, removed: Collection[Path] = ()
) -> None:
    """How many failed, and of which kind: still open, or fixed once and failing again; which files are removed now.

    Only a run on the kernel that a file names tells whether that bug is still open. Before that, which cases come to
    something else in one environment than in another.
    """
    for one in differences(results):
        console.print(Text(f"{one.path}  {one.kernel}  {one.text}", style="bold yellow"), soft_wrap=True)
    ran = [result for result in results if result.verdict is not None]
    failed = {result.saved.path: _status(result) for result in ran if result.failed and result.is_own}
    text = f"{count(len(saved), 'saved case')}, {count(len(ran), 'run')}: {sum(result.failed for result in ran)} failed"
    for status, meaning in _STATUSES.items():
        number = sum(value == status for value in failed.values())
        text += f"; {count(number, 'case')} {meaning}" if number else ""
    tried = [result for result in ran if result.is_own and _status(result) == "open" and _was_judged(result)]
    repaired = {result.saved.path for result in tried} - set(failed)
    elsewhere = any(result.python is not None for result in results)  # it may have been found in another environment
    passing = f"; {count(len(repaired), 'open case')} " + (
        "passing there" if elsewhere else 'now passing: set "status" to "fixed"'
    )
    text += passing if repaired else ""
    text += f"; {count(len(removed), 'case')} of a killed campaign passing, removed" if removed else ""
    idle = {case.path for case in saved} - {result.saved.path for result in ran}
    text += f"; {count(len(idle), 'case')} ran on no kernel" if idle else ""
    console.print(Text(text, style="bold red" if any(result.failed for result in ran) else "bold"), soft_wrap=True)


def write_replayed(path: Path, results: Sequence[Replayed], *, device: str) -> None:
    """Write the results as indented JSON. Raises OSError."""
    document = _Document(
        format=FORMAT,
        device=device,
        failed=sum(result.failed for result in results),
        results=tuple(_result(result) for result in results),
        environments=_environments(results),
        differences=tuple(map(_difference, differences(results))),
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def _environments(results: Sequence[Replayed]) -> tuple[EnvironmentSummary, ...]:
    pythons = {result.python.path: result.python for result in results if result.python is not None}
    devices = {path: next(one.device for one in results if one.python is python) for path, python in pythons.items()}
    return environments_of(list(pythons.values()), devices, {result.kernel.target for result in results})


def _difference(one: Difference) -> _Difference:
    return _Difference(path=str(one.path), kernel=one.kernel, text=one.text, outcomes=outcomes_of(one.outcomes))


def _status(result: Replayed) -> str:
    regression = result.saved.regression
    return "running" if was_running(regression) else regression.status


def _was_judged(result: Replayed) -> bool:
    """Whether it is sure that the oracle which once objected has been asked."""
    return result.saved.regression.finding.oracle not in NOT_EVERYWHERE


def _remarks(result: Replayed) -> Iterator[str]:
    if result.objection is not None:
        yield f": {result.objection}"
        return
    if result.changes:
        yield f"  {', '.join(result.changes)}"
    if count := len(result.saved.regression.preceding):
        yield f"  after {count} other case{'s' if count > 1 else ''}"
    if result.runs > 1:
        yield f"  failed {result.failed_runs} of {result.runs} runs" if result.failed else f"  in {result.runs} runs"


def _outcome(result: Replayed) -> str:
    if result.verdict is None:
        return "skip"
    return "FAIL" if result.failed else "PASS"


def _result(result: Replayed) -> _Result:
    failure = result.verdict.failure if result.verdict is not None else None
    return _Result(
        path=str(result.saved.path),
        status=result.saved.regression.status,
        problem=str(result.kernel.problem),
        kernel=result.kernel.target,
        outcome=_outcome(result).lower(),
        oracle=failure.oracle if failure else None,
        message=failure.message if failure else result.objection,
        runs=result.runs,
        failed_runs=result.failed_runs if result.runs > 1 else int(result.failed),
        changes=result.changes,
        python=str(result.python.path) if result.python is not None else "",
    )
