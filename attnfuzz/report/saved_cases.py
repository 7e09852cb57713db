"""Results of ``attnfuzz replay``, ``merge`` and ``bisect`` on saved cases, for people and for programs."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnfuzz.campaign.compared_environments import Difference, differences
from attnfuzz.campaign.environments import Bisection, Ending, EnvironmentOutcome
from attnfuzz.campaign.judge.journal import was_running
from attnfuzz.campaign.saved.merging import PASSING, Checked, Kept, SavedBug
from attnfuzz.campaign.saved.replay import Replayed, SavedCase
from attnfuzz.oracles.registry import oracle_of
from attnfuzz.report.files import write_json
from attnfuzz.report.findings import count, remedy_lines, title_of
from attnfuzz.report.summary import EnvironmentSummary, OutcomeSummary, environments_of, outcomes_of
from attnfuzz.untrusted_text import only_printable

FORMAT = "attnfuzz.replay/1"

_STATUSES = {"open": "still open", "fixed": "marked fixed", "running": "of a killed campaign"}


class _Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A case that came to something else in one environment than in another."""

    path: str
    kernel: str
    text: str
    outcomes: tuple[OutcomeSummary, ...]


class _Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``python``: the environment that it is of, where any are named. ``unexpected``: see `Replayed`."""

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
    issue: str = ""
    unexpected: bool = False


class _Document(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    format: str
    device: str
    failed: int
    results: tuple[_Result, ...]
    environments: tuple[EnvironmentSummary, ...] = ()
    differences: tuple[_Difference, ...] = ()


def print_replayed(console: Console, result: Replayed, *, known: bool = False) -> None:
    """One line, and for a failure what the oracle says. With ``known``, an open case that fails is xfail and no more,
    and one that passes and may not is XPASS, as in pytest."""
    outcome = _outcome(result)
    if known and result.failed != result.is_unexpected:
        outcome = "xfail" if result.failed else "XPASS"
    style = {"PASS": "green", "FAIL": "bold red", "skip": "yellow", "xfail": "yellow", "XPASS": "bold red"}
    line = Text(f"{outcome}  ", style=style[outcome])
    line.append(f"{result.saved.path}  {result.kernel.target}", style="default")
    line.append("".join(_remarks(result)), style="default")
    console.print(line, soft_wrap=True)
    failure = result.verdict.failure if result.verdict is not None else None
    if failure is not None and outcome != "xfail":
        remedy = remedy_lines(failure.remedy, result.saved.regression.case)
        for text in (f"{failure.name}: {failure.message}", *failure.details, *remedy):
            console.print(Text(f"      {text}"), soft_wrap=True)


def print_total(
    console: Console,
    saved: Sequence[SavedCase],
    results: Sequence[Replayed],
    *,
    removed: Collection[Path] = (),
    known: bool = False,
) -> None:
    """How many failed, and of which kind: still open, or fixed once and failing again; which files are removed now.

    Only a run on the kernel that a file names tells whether that bug is still open. Before that, which cases come to
    something else in one environment than in another. With ``known``, open cases are expected to fail.
    """
    for one in differences(results):
        console.print(Text(f"{one.path}  {one.kernel}  {one.text}", style="bold yellow"), soft_wrap=True)
    ran = [result for result in results if result.verdict is not None]
    if known:
        for result in results:
            if result.is_unexpected and not result.failed:
                repaired_one = (
                    f"{result.saved.path} passes, though it is open; once repaired: {_mark(result.saved.path)}"
                )
                console.print(Text(repaired_one, style="bold red"), soft_wrap=True)
    failed = {result.saved.path: _status(result) for result in ran if result.failed and result.is_own}
    bad = [result for result in ran if result.failed and (result.is_unexpected or not known)]
    text = f"{count(len(saved), 'saved case')}, {count(len(ran), 'run')}: {len(bad)} failed"
    expected = sum(result.failed for result in ran) - len(bad)
    text += f", {expected} failed as expected" if expected else ""
    for status, meaning in _STATUSES.items():
        number = sum(value == status for value in failed.values())
        text += f"; {count(number, 'case')} {meaning}" if number else ""
    tried = [result for result in ran if result.is_own and _status(result) == "open" and _was_judged(result)]
    repaired = {result.saved.path for result in tried} - set(failed)
    elsewhere = any(result.python is not None for result in results)  # it may have been found in another environment
    marked = _mark(*repaired) if len(repaired) == 1 else "attnfuzz triage --fixed FILE"
    remedy = "" if known else f"; once repaired: {marked}"  # else each is told above, with its command
    passing = f"; {count(len(repaired), 'open case')} " + ("passing there" if elsewhere else f"now passing{remedy}")
    text += passing if repaired else ""
    text += f"; {count(len(removed), 'case')} of a killed campaign passing, removed" if removed else ""
    idle = {case.path for case in saved} - {result.saved.path for result in ran}
    text += f"; {count(len(idle), 'case')} ran on no kernel" if idle else ""
    is_bad = any(result.is_unexpected if known else result.failed for result in ran)
    console.print(Text(text, style="bold red" if is_bad else "bold"), soft_wrap=True)


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
    write_json(path, document)


def _environments(results: Sequence[Replayed]) -> tuple[EnvironmentSummary, ...]:
    pythons = {result.python.path: result.python for result in results if result.python is not None}
    devices = {path: next(one.device for one in results if one.python is python) for path, python in pythons.items()}
    return environments_of(list(pythons.values()), devices, {result.kernel.target for result in results})


def _difference(one: Difference) -> _Difference:
    return _Difference(path=str(one.path), kernel=one.kernel, text=one.text, outcomes=outcomes_of(one.outcomes))


def _mark(path: Path) -> str:
    return shlex.join(["attnfuzz", "triage", "--fixed", str(path)])


def _status(result: Replayed) -> str:
    regression = result.saved.regression
    return "running" if was_running(regression) else regression.status


def _was_judged(result: Replayed) -> bool:
    """Whether it is sure that the oracle which once objected has been asked."""
    return oracle_of(result.saved.regression.finding.oracle).judges_everywhere


def _remarks(result: Replayed) -> Iterator[str]:
    if result.objection is not None:
        yield f": {result.objection}"
        return
    if result.failed and result.is_own and result.saved.regression.issue:
        yield f"  known: {result.saved.regression.issue}"
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
        issue=result.saved.regression.issue,
        unexpected=result.is_unexpected,
    )


def print_triage(console: Console, saved: Sequence[SavedCase]) -> None:
    """A table of all cases, the open ones first, then the flaky ones; and how many there are of each."""
    rows = sorted(saved, key=lambda one: (_TRIAGE.index(_standing(one)), one.regression.kernel, one.path))
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_OF_FILES)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("status", "since", "kernel", "finding", "issue", "file"):
        table.add_column(title, overflow="fold", no_wrap=title in ("status", "since"))
    for one in rows:
        regression, finding = one.regression, one.regression.finding
        status = _standing(one)
        rate = f" {finding.failed} of {finding.runs}" if status == "flaky" else ""
        table.add_row(
            Text(status + rate, style="green" if status == "fixed" else "yellow" if status == "flaky" else "bold red"),
            Text(only_printable(regression.environment.date) or "-"),
            Text(only_printable(regression.kernel)),
            Text("/".join(filter(None, (finding.oracle, finding.kind)))),
            Text(regression.issue or "-"),
            Text(str(one.path)),
        )
    console.print(table)
    numbers = Counter(map(_standing, saved))
    unnamed = sum(not one.regression.issue for one in saved if _standing(one) != "fixed")
    total = f"{count(len(saved), 'saved case')}: {', '.join(f'{numbers[name]} {name}' for name in _TRIAGE)}"
    total += f'; {unnamed} without an "issue"' if unnamed else ""
    console.print(Text(total, style="bold"), soft_wrap=True)


_TRIAGE = ("open", "flaky", "fixed")


def _standing(saved: SavedCase) -> str:
    """An open case that fails now and then is flaky."""
    regression = saved.regression
    return "flaky" if regression.status == "open" and regression.finding.is_flaky else regression.status


_WIDTH_OF_FILES = 1000
"""Columns where the output is no terminal: paths are copied from there, so they must not be broken."""
_STYLES = {"fails": "bold red", "fails again": "bold red", "not verified": "yellow"}


@dataclass(frozen=True, slots=True)
class Merged:
    """A bug, the case that stands for it, and where that lies."""

    bug: SavedBug
    checked: Checked
    kept: Kept

    @property
    def is_fixed(self) -> bool:
        """Whether the case is marked as one that must pass."""
        return self.checked.saved.regression.status == "fixed"

    @property
    def counts(self) -> bool:
        """Whether there is a bug, for all that is known."""
        return self.checked.outcome == "fails" or (self.checked.outcome == "unverified" and not self.is_fixed)

    def outcome(self) -> str:
        """The outcome of running the case."""
        names = {"fails": "fails again" if self.is_fixed else "fails", "passes": "passes", "unverified": "not verified"}
        return names[self.checked.outcome]


def print_merged(
    console: Console, rows: Sequence[Merged], *, files: int, folders: int, output: Path, verified: bool
) -> None:
    """The table, why cases were not verified, and the total. ``files`` were read from ``folders``."""
    if rows:
        if not console.is_terminal:
            console.width = max(console.width, _WIDTH_OF_FILES)
        console.print(_table(rows))
    for row in rows:
        for line in _merged_remarks(row):
            console.print(Text(line), soft_wrap=True)
    style = "bold red" if any(row.counts for row in rows) else "bold"
    console.print(Text(_total(rows, files, folders, output, verified), style=style), soft_wrap=True)


def _table(rows: Sequence[Merged]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("kernel", overflow="fold")
    table.add_column("finding", overflow="fold")
    table.add_column("files", justify="right")
    table.add_column("run here", no_wrap=True)
    table.add_column("kept as", overflow="fold")
    for row in rows:
        outcome = row.outcome()
        table.add_row(
            Text(row.checked.saved.regression.kernel),
            Text(title_of(row.bug.regression.finding) + (" (fixed)" if row.is_fixed else "")),
            str(len(row.bug.files)),
            Text(outcome, style=_STYLES.get(outcome, "green")),
            Text(str(row.kept.path)),
        )
    return table


def _merged_remarks(row: Merged) -> Iterator[str]:
    name = row.kept.path.name
    if row.checked.reason:
        yield f"{name} was not verified: {row.checked.reason}"
    for path in row.kept.replaced:
        yield f"{name} replaces {path.name}, the same bug in a larger case"
    if row.checked.outcome == "passes" and not row.is_fixed and row.kept.path.parent.name != PASSING:
        yield f"{name} was there before and passes now; once repaired: {_mark(row.kept.path)}"


def _total(rows: Sequence[Merged], files: int, folders: int, output: Path, verified: bool) -> str:
    bugs = [row for row in rows if row.counts]
    aside = sum(row.kept.path.parent.name == PASSING for row in rows)
    text = f"{count(files, 'file')} from {count(folders, 'place')}: {count(len(bugs), 'bug')} in {output}"
    for outcome in ("fails", "fails again", "not verified"):
        number = sum(row.outcome() == outcome for row in bugs)
        verb = outcome.replace("fails", "fail") if number > 1 else outcome
        text += f"; {number} {verb}" if number else ""
    text += f"; put aside in {output / PASSING}, passing now: {aside}" if aside else ""
    fixed = sum(row.is_fixed and not row.counts for row in rows)
    text += f"; {count(fixed, 'case')} marked fixed" if fixed else ""
    return text if verified else f"{text}; nothing was run: merge again without --no-verify where the kernels run"


BISECTION_FORMAT = "attnfuzz.bisection/1"


_ENDINGS: dict[Ending, tuple[str, str]] = {
    "passes": ("PASS", "green"),
    "fails": ("FAIL", "bold red"),
    "is not judged": ("skip", "yellow"),
}


class _Bisection(msgspec.Struct, frozen=True, kw_only=True):
    """``first_failing``: the interpreter of the first environment known to fail; ``outcomes`` in their order."""

    format: str
    path: str
    kernel: str
    text: str
    first_failing: str | None
    outcomes: tuple[OutcomeSummary, ...]
    environments: tuple[EnvironmentSummary, ...]


def print_outcome(console: Console, path: Path, outcome: EnvironmentOutcome) -> None:
    """One line, and for a failure what the oracle says."""
    word, style = _ENDINGS[outcome.ending]
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
    write_json(path, document)
