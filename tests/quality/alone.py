"""`python -m tests.quality.alone [FILE]`: what each oracle adds, over the planted bugs, as Markdown.

A bug counts for an oracle alone if the case that killed it is seen by no other, and if another hunt, without that
oracle, ends without a finding.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attnfuzz.declaration import Declaration
from attnfuzz.mutation import mutants as generated
from attnfuzz.mutation.killers import SearchKiller
from attnfuzz.mutation.outcomes import MutantOutcome, Score
from attnfuzz.oracles.registry import DEFAULT_ORACLES
from attnfuzz.report.mutants import markdown_table, tables_of
from tests.quality.mutants import MUTANTS, Mutant, mutant_named
from tests.quality.planting import KERNELS, lay_over
from tests.quality.searching import hunting

__all__ = ["Told", "page"]

Told = tuple[Mutant, MutantOutcome]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.quality.alone", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="also write the tables there")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each hunt")
    parser.add_argument("--jobs", type=int, default=2, help="bugs hunted at once")
    parser.add_argument("--only", nargs="+", metavar="MUTANT", help="hunt these")
    arguments = parser.parse_args()
    mutants = [mutant_named(name) for name in arguments.only] if arguments.only else MUTANTS
    with (
        hunting(mutants, device=arguments.device, budget_s=arguments.budget) as (hunter, declarations),
        ThreadPoolExecutor(arguments.jobs) as pool,
    ):
        kill = SearchKiller(hunter, alone=True)

        def put(mutant: Mutant) -> Told:
            with tempfile.TemporaryDirectory() as folder:
                outcome = kill(_as_generated(mutant, declarations[mutant.kernel]), lay_over(mutant, Path(folder)))
            print(f"{mutant.name}: {_told(outcome)}", flush=True)
            return mutant, outcome

        results = list(pool.map(put, mutants))
    where = f"{arguments.device}, {os.cpu_count()} cores"
    today = datetime.date.today().isoformat()
    text = "\n".join(
        [
            "# What each oracle adds",
            "",
            f"Measured {today} with `python -m tests.quality.alone --device {arguments.device} --budget "
            f"{arguments.budget:g} --jobs {arguments.jobs}` on {where}: {len(results)} planted bugs, of which "
            f"{sum(bool(mutant.reference) for mutant, _ in results)} re-create reports. Alone: no other oracle sees "
            "the case, and a hunt of the same length without this one finds nothing.",
            "",
            *page(results),
            "",
        ]
    )
    print(text)
    if arguments.file is not None:
        arguments.file.write_text(text)


def page(results: Sequence[Told]) -> Iterator[str]:
    """The table of oracles, those without a line in it, and the bugs that one oracle alone finds."""
    score = Score((_as_generated(mutant, None), outcome) for mutant, outcome in results)
    *_, oracles = tables_of(score)
    yield from markdown_table(*oracles)
    yield ""
    idle = sorted(set(DEFAULT_ORACLES) - {share.name for share in score.by_oracle()})
    if idle:
        yield f"No planted bug shows to {', '.join(idle)}."
        yield ""
    yield "| bug | found by this oracle alone |"
    yield "|---|---|"
    alone = [(outcome.kill.seen_by[0], mutant) for mutant, outcome in results if outcome.kill and outcome.kill.alone]
    for oracle, mutant in sorted(alone, key=lambda one: (one[0], one[1].name)):
        yield f"| {mutant.name}: {mutant.bug} | {oracle} |"
    if missed := [mutant.name for mutant, outcome in results if outcome.status != "killed"]:
        yield ""
        yield f"Not found: {', '.join(missed)}."


def _as_generated(mutant: Mutant, kernel: Declaration | None) -> generated.Mutant:
    """A planted bug in the form of one that `attnfuzz mutants` makes, as far as a hunt goes by it."""
    first = mutant.edits[0]
    return generated.Mutant(
        operator="by hand",
        path=KERNELS / first.file,
        function=mutant.name,
        line=1,
        before=(first.old,),
        after=(first.new,),
        data=b"",
        kernels=() if kernel is None else (kernel,),
    )


def _told(outcome: MutantOutcome) -> str:
    kill = outcome.kill
    if kill is None:
        return outcome.status
    alone = " alone" if kill.alone else ""
    return f"{kill.by}{alone} after {kill.seconds:.1f} s, seen by {', '.join(kill.seen_by)}"


if __name__ == "__main__":
    main()
