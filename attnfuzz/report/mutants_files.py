"""What ``attnfuzz mutants`` writes: ``attnfuzz.mutants/1`` as JSON, and a page in Markdown."""

from __future__ import annotations

import contextlib
import datetime
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from attnfuzz.data_files import MOST_RESULT_BYTES, read_data_file
from attnfuzz.mutation.measurement import Measured
from attnfuzz.mutation.mutants import Mutant
from attnfuzz.mutation.outcomes import Kill, Outcome, Status
from attnfuzz.mutation.score import Score
from attnfuzz.report.files import write_file
from attnfuzz.report.headline import count
from attnfuzz.report.mutants import headline, notes, oracle_rows

__all__ = [
    "FORMAT",
    "Checkpoints",
    "MutantResult",
    "MutantsFile",
    "known_outcomes",
    "read_mutants_json",
    "write_mutants_json",
    "write_mutants_markdown",
]

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
    wrongly: bool = False


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

    def __call__(self, measured: Measured) -> None:
        if time.monotonic() < self._next or (self._path.exists() and not self._path.is_file()):
            return
        with contextlib.suppress(OSError):  # what cannot be written is told at the end
            write_mutants_json(measured, self._path)
        self._next = time.monotonic() + _CHECKPOINT_EVERY_S


def read_mutants_json(path: Path) -> MutantsFile:
    """What ``write_mutants_json`` wrote. Raises OSError, and ValueError with one sentence for anything else."""
    try:
        found = msgspec.json.decode(read_data_file(path, MOST_RESULT_BYTES), type=MutantsFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{os.fspath(path)!r} is not what attnfuzz mutants --json writes: {error}") from error
    if found.format != FORMAT:
        raise ValueError(f"{os.fspath(path)!r} has the format {found.format!r}; must be {FORMAT!r}")
    return found


def known_outcomes(earlier: MutantsFile) -> Mapping[str, Outcome]:
    """What the killer came to, by id of the mutant: one that is listed as equivalent survived if it was hunted."""
    found: dict[str, Outcome] = {}
    for one in earlier.mutants:
        if one.status == "error" or (one.status == "equivalent" and not one.cases):
            continue
        is_listed = one.status == "equivalent" or one.wrongly
        found[one.id] = Outcome(
            status="survived" if one.status == "equivalent" else one.status,
            seconds=one.seconds,
            cases=one.cases,
            kill=one.kill,
            detail="" if is_listed else one.detail,
        )
    return found


def write_mutants_json(measured: Measured, path: Path) -> None:
    """Everything that was measured. Raises OSError."""
    write_file(path, msgspec.json.format(msgspec.json.encode(as_data(measured))))


def as_data(measured: Measured) -> MutantsFile:
    """What the JSON file says."""
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


def write_mutants_markdown(measured: Measured, path: Path) -> None:
    """Tables and survivors, for documentation. Raises OSError."""
    write_file(path, ("\n".join(_page(measured)) + "\n").encode())


def _result(mutant: Mutant, outcome: Outcome) -> MutantResult:
    return MutantResult(
        id=mutant.id,
        operator=mutant.operator,
        file=mutant.place.rpartition(":")[0],
        line=mutant.line,
        function=mutant.function,
        before=mutant.before,
        after=mutant.after,
        kernels=tuple(kernel.target for kernel in mutant.kernels),
        status=outcome.status,
        seconds=outcome.seconds,
        cases=outcome.cases,
        kill=outcome.kill,
        detail=outcome.detail,
        wrongly=outcome.wrongly,
    )


def _page(measured: Measured) -> Iterator[str]:
    score, request = Score(measured.outcomes), measured.request
    yield "# Mutants"
    yield ""
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
    yield "| operator | killed | survived | equivalent | stillborn | score | median, s | longest, s |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for name, part in score.by_operator().items():
        counts = part.counts
        numbers = " | ".join(str(counts[status]) for status in ("killed", "survived", "equivalent", "stillborn"))
        yield f"| {name} | {numbers} | {part.share:.0%} | {part.median_s:.2f} | {part.longest_s:.1f} |"
    if any(kill.seen_by for kill in score.kills):
        yield ""
        yield "| oracle | killed first | sees the case | no other sees it | killed by it alone |"
        yield "|---|---:|---:|---:|---:|"
        yield from (f"| {' | '.join(row)} |" for row in oracle_rows(score))
    for title, status in (("Survivors", "survived"), ("Could not be told", "error")):
        yield from _diffs(title, [pair for pair in measured.outcomes if pair[1].status == status])


def _command(measured: Measured) -> str:
    """The command line, but for a command that kills and the files that are written."""
    request = measured.request
    words = ["attnfuzz mutants", *map(shlex.quote, request.kernels), f"--device {measured.device}"]
    words += [f"--operator {name}" for name in request.operators] + [f"--mutant {one}" for one in request.ids]
    if request.shard[1] > 1 and measured.left:
        words += [f"--shard {request.shard[0]}/{request.shard[1]}"]
    words += ["--alone"] * request.alone + ["--check-equivalent"] * request.check_equivalents
    return " ".join(words)


def _diffs(title: str, pairs: list[tuple[Mutant, Outcome]]) -> Iterator[str]:
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
