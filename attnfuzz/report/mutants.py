"""What ``attnfuzz mutants`` prints: a line for each mutant that is not killed, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnfuzz.campaign.stopping import format_duration
from attnfuzz.mutation.measurement import Measured
from attnfuzz.mutation.mutants import Mutant
from attnfuzz.mutation.outcomes import Outcome
from attnfuzz.mutation.score import Score
from attnfuzz.report.headline import count

__all__ = ["Progress", "headline", "notes", "oracle_rows", "print_measured", "print_mutants"]

_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def print_mutants(console: Console, mutants: Sequence[Mutant]) -> None:
    """What would be put to the killer, as diffs."""
    for mutant in mutants:
        kernels = ", ".join(kernel.name for kernel in mutant.kernels)
        console.print(Text.assemble((mutant.id, "bold"), f"  runs in {kernels}"))
        _print_diff(console, mutant)
    console.print(Text(count(len(mutants), "mutant")))


class Progress:
    """Prints a line as soon as it is known what became of a mutant; nothing if ``quiet``."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._done = 0

    def note(self, text: str) -> None:
        """What is being done before the first mutant."""
        self._print(Text(text))

    def heard(self, mutant: Mutant, outcome: Outcome) -> None:
        """What became of one."""
        self._done += 1
        what: str = outcome.status
        if outcome.kill is not None:
            what = f"{outcome.status} by {outcome.kill.by} in {outcome.kill.seconds:.1f} s"
        stands_out = outcome.status in ("survived", "error") or outcome.wrongly
        line = f"{self._done} {mutant.place} {mutant.operator}: {what}"
        self._print(Text(line, style="yellow" if stands_out else ""))

    def _print(self, text: Text) -> None:
        if not self._quiet:
            self._console.print(text)
            self._console.file.flush()


def print_measured(console: Console, measured: Measured) -> None:
    """The score, what is behind it, and every survivor."""
    score = Score(measured.outcomes)
    console.print()
    console.print(_by_operator(score))
    if any(kill.seen_by for kill in score.kills):
        console.print()
        console.print(_by_oracle(score))
    for title, pairs in (
        ("survived", score.of("survived")),
        ("not equivalent, though listed", [pair for pair in score.outcomes if pair[1].wrongly]),
        ("could not be told", score.of("error")),
    ):
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


def headline(measured: Measured) -> str:
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


def notes(measured: Measured) -> Iterator[str]:
    """What is worth knowing beside the score."""
    if measured.without_code:
        names = ", ".join(kernel.name for kernel in measured.without_code)
        yield f"no Triton code beside these kernels' own file, so nothing to change: {names}"
    for entry in measured.stale:
        yield f"stale: no mutant matches the equivalent {entry.file} {entry.function} {entry.operator}: {entry.becomes}"


def oracle_rows(score: Score) -> Iterator[tuple[str, ...]]:
    """Of the table of oracles: name, kills, cases seen, seen by no other, killed by it alone."""
    for share in score.by_oracle():
        alone = "" if share.alone is None else str(share.alone)
        yield share.name, str(share.first), str(share.sees), str(share.only_one), alone


def _by_operator(score: Score) -> Table:
    table = _table("operator", "killed", "survived", "equivalent", "stillborn", "score", "median s", "longest s")
    for name, part in score.by_operator().items():
        counts = part.counts
        numbers = (str(counts[status]) for status in ("killed", "survived", "equivalent", "stillborn"))
        table.add_row(name, *numbers, f"{part.share:.0%}", f"{part.median_s:.2f}", f"{part.longest_s:.1f}")
    return table


def _by_oracle(score: Score) -> Table:
    table = _table("oracle", "killed first", "sees the case", "no other sees it", "killed by it alone")
    for row in oracle_rows(score):
        table.add_row(*row)
    return table


def _effort(outcome: Outcome) -> str:
    return f"  ({outcome.cases:,} cases in {outcome.seconds:.0f} s)" if outcome.cases else ""


def _print_diff(console: Console, mutant: Mutant) -> None:
    for line in mutant.diff:
        console.print(Text(f"  {line}", style=_STYLES.get(line[0], "")))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    return table
