"""Output of ``attnfuzz mutants``: lines and tables, ``attnfuzz.mutants/1`` as JSON, and a page in Markdown."""

from __future__ import annotations

import contextlib
import datetime
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnfuzz.campaign.stopping import format_duration
from attnfuzz.data_files import MOST_RESULT_BYTES, read_data_file
from attnfuzz.mutation.measurement import MeasuredMutants
from attnfuzz.mutation.mutants import Kill, Mutant, MutantOutcome, Score, Status
from attnfuzz.own_files import write_file
from attnfuzz.report.files import write_json
from attnfuzz.report.findings import count

_INTRODUCTION = (
    "How many small bugs in these kernels are found, and how soon. `attnfuzz mutants` makes one change at a time in "
    "a kernel's Triton code and searches it, or runs your tests on it. A mutant is *killed* where that reports a "
    "failure, and *survived* where it does not; these two make the score. An *equivalent* mutant is listed with the "
    "reason why nothing can find it, and a *stillborn* one does not run. An operator is a kind of change: two "
    "strides swapped, a mask dropped. The diffs of survivors are at the end: each is a change that no case "
    "told from the kernel."
)
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def print_mutants(console: Console, mutants: Sequence[Mutant]) -> None:
    """Print the mutants that would be put to the killer, as diffs."""
    for mutant in mutants:
        kernels = ", ".join(kernel.name for kernel in mutant.kernels)
        console.print(Text.assemble((mutant.id, "bold"), f"  runs in {kernels}"))
        _print_diff(console, mutant)
    console.print(Text(count(len(mutants), "mutant")))


class MutantsProgress:
    """Prints a line as soon as it is known what became of a mutant; nothing if ``quiet``."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._done = 0

    def note(self, text: str) -> None:
        """Say what is being done before the first mutant."""
        self._print(Text(text))

    def on_outcome(self, mutant: Mutant, outcome: MutantOutcome) -> None:
        """Say what became of a mutant."""
        self._done += 1
        what: str = outcome.status
        if outcome.kill is not None:
            what = f"{outcome.status} by {outcome.kill.by} in {outcome.kill.seconds:.1f} s"
        line = f"{self._done} {mutant.place} {mutant.operator}: {what}"
        self._print(Text(line, style="yellow" if outcome.status in ("survived", "error") else ""))

    def _print(self, text: Text) -> None:
        if not self._quiet:
            self._console.print(text)
            self._console.file.flush()


def print_measured(console: Console, measured: MeasuredMutants) -> None:
    """The score, what is behind it, and every survivor."""
    score = Score(measured.outcomes)
    columns, rows = table_of(score)
    console.print()
    console.print(_table(columns, rows))
    for title, pairs in (("survived", score.of("survived")), ("could not be told", score.of("error"))):
        for mutant, outcome in pairs:
            console.print()
            console.print(Text.assemble((f"{title}: ", "yellow"), (mutant.id, "bold"), _effort(outcome)))
            _print_diff(console, mutant)
            if outcome.detail:
                console.print(Text(f"  {outcome.detail}"))
    console.print()
    for note in notes(measured):
        console.print(Text(note, style="yellow"))
    console.print(Text(headline(measured), style="bold"))


def headline(measured: MeasuredMutants) -> str:
    """The score in one sentence."""
    score = Score(measured.outcomes)
    counts = score.counts
    killed, survived = counts["killed"], counts["survived"]
    text = f"{killed} of {count(killed + survived, 'mutant')} killed ({score.share:.1%}), {survived} survived"
    text += f"; {counts['equivalent']} equivalent, {counts['stillborn']} stillborn"
    text += f", {counts['error']} could not be told" if counts["error"] else ""
    text += f", {measured.left} not tried yet" if measured.left else ""
    times = f"time to kill: median {score.median_s:.2f} s, longest {score.longest_s:.1f} s"
    return f"{text}; {times}; {format_duration(measured.seconds)} in all"


def notes(measured: MeasuredMutants) -> Iterator[str]:
    """Remarks beside the score."""
    if measured.without_code:
        names = ", ".join(kernel.name for kernel in measured.without_code)
        yield f"no Triton code beside these kernels' own file, so nothing to change: {names}"
    for entry in measured.stale:
        yield f"stale: no mutant matches the equivalent {entry.file} {entry.function} {entry.operator}: {entry.becomes}"


def table_of(score: Score) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Columns and rows, one for each operator."""
    statuses: tuple[Status, ...] = ("killed", "survived", "equivalent", "stillborn")
    operators = [
        (
            *(name, *(str(part.counts[status]) for status in statuses)),
            *(f"{part.share:.0%}", f"{part.median_s:.2f}", f"{part.longest_s:.1f}"),
        )
        for name, part in score.by_operator().items()
    ]
    return ("operator", *statuses, "score", "median s", "longest s"), operators


def _effort(outcome: MutantOutcome) -> str:
    return f"  ({outcome.cases:,} cases in {outcome.seconds:.0f} s)" if outcome.cases else ""


def _print_diff(console: Console, mutant: Mutant) -> None:
    for line in mutant.diff:
        console.print(Text(f"  {line}", style=_STYLES.get(line[0], "")))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


FORMAT = "attnfuzz.mutants/1"
_CHECKPOINT_EVERY_S = 5.0


class MutantResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One mutant, and what became of it. ``file`` is relative to the working directory where it lies below."""

    id: str
    operator: str
    file: str
    line: int
    function: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    kernels: tuple[str, ...]
    status: Status
    seconds: float = 0.0
    cases: int = 0
    kill: Kill | None = None
    detail: str = ""


class MutantsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One measurement. ``score``: killed mutants among those that run and are not equivalent. Times are in seconds.

    Of ``left`` mutants nothing is known yet.
    """

    format: str
    kernels: tuple[str, ...]
    killer: str
    device: str
    jobs: int
    seed: int
    budget_s: float
    elapsed_s: float
    score: float
    counts: dict[str, int]
    median_s: float
    longest_s: float
    mutants: tuple[MutantResult, ...]
    stale: tuple[str, ...] = ()
    left: int = 0


class Checkpoints:
    """Writes what is known so far to the JSON file at ``path`` every few seconds, unless that is a pipe or a device."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = time.monotonic()

    def __call__(self, measured: MeasuredMutants) -> None:
        if time.monotonic() < self._next or (self._path.exists() and not self._path.is_file()):
            return
        with contextlib.suppress(OSError):  # what cannot be written is told at the end
            write_mutants_json(measured, self._path)
        self._next = time.monotonic() + _CHECKPOINT_EVERY_S


def read_mutants_json(path: Path) -> MutantsFile:
    """The contents of a file of ``write_mutants_json``. Raises OSError, and ValueError with one sentence."""
    try:
        found = msgspec.json.decode(read_data_file(path, MOST_RESULT_BYTES), type=MutantsFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{os.fspath(path)!r} is not what attnfuzz mutants --json writes: {error}") from error
    if found.format != FORMAT:
        raise ValueError(f"{os.fspath(path)!r} has the format {found.format!r}; must be {FORMAT!r}")
    return found


def known_outcomes(earlier: MutantsFile) -> Mapping[str, MutantOutcome]:
    """Outcomes by id of the mutants that were put to the killer and could be told."""
    return {
        one.id: MutantOutcome(status=one.status, seconds=one.seconds, cases=one.cases, kill=one.kill, detail=one.detail)
        for one in earlier.mutants
        if one.status not in ("error", "equivalent")
    }


def write_mutants_json(measured: MeasuredMutants, path: Path) -> None:
    """Everything that was measured. Raises OSError."""
    write_json(path, as_data(measured))


def as_data(measured: MeasuredMutants) -> MutantsFile:
    """The contents of the JSON file."""
    score, request = Score(measured.outcomes), measured.request
    return MutantsFile(
        format=FORMAT,
        kernels=tuple(kernel.target for kernel in measured.kernels),
        killer=request.command or "attnfuzz",
        device=measured.device_name,
        jobs=measured.jobs,
        seed=request.seed,
        budget_s=request.budget_s,
        elapsed_s=measured.seconds,
        score=score.share,
        counts={str(status): number for status, number in sorted(score.counts.items())},
        median_s=score.median_s,
        longest_s=score.longest_s,
        mutants=tuple(_result(mutant, outcome) for mutant, outcome in measured.outcomes),
        stale=tuple(f"{entry.file} {entry.function} {entry.operator}: {entry.becomes}" for entry in measured.stale),
        left=measured.left,
    )


def write_mutants_markdown(measured: MeasuredMutants, path: Path) -> None:
    """Tables and survivors, for documentation. Raises OSError."""
    write_file(path, ("\n".join(_page(measured)) + "\n").encode())


def _result(mutant: Mutant, outcome: MutantOutcome) -> MutantResult:
    return MutantResult(
        id=mutant.id,
        operator=mutant.operator,
        file=mutant.place.rpartition(":")[0],
        line=mutant.line,
        function=mutant.function,
        before=mutant.before,
        after=mutant.after,
        kernels=tuple(kernel.target for kernel in mutant.kernels),
        **msgspec.structs.asdict(outcome),
    )


def _page(measured: MeasuredMutants) -> Iterator[str]:
    score, request = Score(measured.outcomes), measured.request
    yield from ("# Mutants", "", _INTRODUCTION, "")
    killer = f"`{request.command}`" if request.command else f"attnfuzz's search, {request.budget_s:g} s for each mutant"
    yield (
        f"Measured {datetime.date.today().isoformat()} with `{_command(measured)}` on {measured.device_name}: "
        f"{count(len(measured.kernels), 'kernel')}, killed by {killer}, {measured.jobs} at once, seed {request.seed}. "
        "Seconds count from the first case, or from the start of the command that kills; one run of each mutant."
    )
    yield ""
    yield f"{headline(measured)}."
    yield ""
    if beside := [f"* {note}" for note in notes(measured)]:
        yield from (*beside, "")
    yield from markdown_table(*table_of(score))
    for title, status in (("Survivors", "survived"), ("Could not be told", "error")):
        yield from _diffs(title, [pair for pair in measured.outcomes if pair[1].status == status])


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """All but the first column to the right."""
    yield f"| {' | '.join(columns)} |"
    yield f"|---|{'---:|' * (len(columns) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _command(measured: MeasuredMutants) -> str:
    """The command line, but for a command that kills and the files that are written."""
    request = measured.request
    words = ["attnfuzz mutants", *map(shlex.quote, request.kernels), f"--device {measured.device}"]
    words += [f"--operator {name}" for name in request.operators] + [f"--mutant {one}" for one in request.ids]
    if request.shard[1] > 1 and measured.left:
        words += [f"--shard {request.shard[0]}/{request.shard[1]}"]
    return " ".join(words)


def _diffs(title: str, pairs: list[tuple[Mutant, MutantOutcome]]) -> Iterator[str]:
    if not pairs:
        return
    yield ""
    yield f"## {title}"
    for mutant, outcome in pairs:
        yield ""
        yield f"`{mutant.id}` {outcome.detail}".rstrip()
        yield ""
        yield "```diff"
        yield from mutant.diff
        yield "```"
