"""The results of ``attnfuzz replay`` for people and for programs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from attnfuzz.campaign.journal import was_running
from attnfuzz.campaign.replay import Replayed, SavedCase
from attnfuzz.oracles.verdict import NOT_EVERYWHERE
from attnfuzz.report.headline import count, remedy_lines

__all__ = ["FORMAT", "print_replayed", "print_total", "write_replayed"]

FORMAT = "attnfuzz.replay/1"

_STATUSES = {"open": "still open", "fixed": "marked fixed", "running": "of a killed campaign"}


class _Result(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    status: str
    problem: str
    kernel: str
    outcome: str
    oracle: str | None
    message: str | None
    runs: int
    failed_runs: int


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    device: str
    failed: int
    results: tuple[_Result, ...]


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

    Only a run on the kernel that a file names tells whether that bug is still open.
    """
    ran = [result for result in results if result.verdict is not None]
    failed = {
        result.saved.path: _status(result)
        for result in ran
        if result.failed and (result.is_own or _status(result) != "open")
    }
    text = f"{count(len(saved), 'saved case')}, {count(len(ran), 'run')}: {sum(result.failed for result in ran)} failed"
    for status, meaning in _STATUSES.items():
        number = sum(value == status for value in failed.values())
        text += f"; {count(number, 'case')} {meaning}" if number else ""
    tried = [result for result in ran if result.is_own and _status(result) == "open" and _was_judged(result)]
    repaired = {result.saved.path for result in tried} - set(failed)
    passing = f'; {count(len(repaired), "open case")} now passing: set "status" to "fixed"'
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
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


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
        problem=result.saved.regression.problem,
        kernel=result.kernel.target,
        outcome=_outcome(result).lower(),
        oracle=failure.oracle if failure else None,
        message=failure.message if failure else result.objection,
        runs=result.runs,
        failed_runs=result.failed_runs if result.runs > 1 else int(result.failed),
    )
