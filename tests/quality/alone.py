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
from dataclasses import dataclass, replace
from pathlib import Path

from attnfuzz.declaration import Declaration
from attnfuzz.isolation.outcomes import ServiceError
from attnfuzz.judging.runner import Runner
from attnfuzz.mutation.hunting import Hunt, Hunter
from attnfuzz.mutation.mutants import Kill
from attnfuzz.oracles.registry import DEFAULT_ORACLES, DETERMINISM, HANG, OracleName, oracle_of
from attnfuzz.overlay import VARIABLE
from attnfuzz.problems.cases import decode_case
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.report.mutants import markdown_table
from tests.quality.mutants import MUTANTS, Mutant, mutant_named
from tests.quality.planting import lay_over
from tests.quality.searching import hunting

_SECOND_RUN: tuple[OracleName, ...] = (DETERMINISM.name,)
"""Asked beside the oracles of deaths: a kernel may die in the second run, which these alone would not have."""


@dataclass(frozen=True, slots=True)
class Told:
    """How a planted bug was found, if it was; ``seen_by``: oracles that object to the case when each is asked alone.

    ``alone``: whether a hunt without the only one of them found nothing.
    """

    mutant: Mutant
    kill: Kill | None = None
    seen_by: tuple[OracleName, ...] = ()
    alone: bool = False

    def __str__(self) -> str:
        if self.kill is None:
            return f"{self.mutant.name}: survived"
        alone = " alone" if self.alone else ""
        seen = ", ".join(self.seen_by)
        return f"{self.mutant.name}: {self.kill.by}{alone} after {self.kill.seconds:.1f} s, seen by {seen}"


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

        def put(mutant: Mutant) -> Told:
            with tempfile.TemporaryDirectory() as folder:
                overlay = {VARIABLE: str(lay_over(mutant, Path(folder)))}
                told = _hunted(mutant, declarations[mutant.kernel], hunter, overlay)
            print(told, flush=True)
            return told

        results = list(pool.map(put, mutants))
    where = f"{arguments.device}, {os.cpu_count()} cores"
    today = datetime.date.today().isoformat()
    text = "\n".join(
        [
            "# What each oracle adds",
            "",
            f"Measured {today} with `python -m tests.quality.alone --device {arguments.device} --budget "
            f"{arguments.budget:g} --jobs {arguments.jobs}` on {where}: {len(results)} planted bugs, of which "
            f"{sum(bool(one.mutant.reference) for one in results)} re-create reports. Alone: no other oracle sees "
            "the case, and a hunt of the same length without this one finds nothing.",
            "",
            *page(results),
            "",
        ]
    )
    print(text)
    if arguments.file is not None:
        arguments.file.write_text(text)


def _hunted(mutant: Mutant, declaration: Declaration, hunter: Hunter, overlay: dict[str, str]) -> Told:
    with hunter.runner(overlay) as runner:
        kill = Hunt(hunter, runner, [declaration]).run().kill
        if kill is None:
            return Told(mutant)
        seen = seen_by(runner, declaration, kill)
    if len(seen) != 1:
        return Told(mutant, kill, seen)
    others = replace(hunter, oracles=tuple(oracle for oracle in hunter.oracles if oracle not in seen))
    with others.runner(overlay) as runner:
        return Told(mutant, kill, seen, alone=Hunt(others, runner, [declaration]).run().kill is None)


def seen_by(runner: Runner, declaration: Declaration, kill: Kill) -> tuple[OracleName, ...]:
    """The oracles that see the case of a kill. Of a case that hangs only the hang, for which each would wait."""
    if kill.by == HANG.name:
        return (HANG.name,)
    case = decode_case(declaration.problem, bytes(kill.case))
    found: list[OracleName] = []
    for oracle in DEFAULT_ORACLES:
        runner.oracles = (oracle, *_SECOND_RUN) if oracle_of(oracle).ends_process else (oracle,)
        try:
            failure = runner.judge(declaration, case, relations=oracle_of(oracle).relations).failure
        except (ServiceError, CaseTooLarge):  # nothing is known of the kernel then
            failure = None
        if oracle == kill.by or (failure is not None and failure.oracle == oracle):
            found.append(oracle)
    return tuple(found)


def page(results: Sequence[Told]) -> Iterator[str]:
    """The table of oracles, those without a line in it, and the bugs that one oracle alone finds."""
    kills = [(one, one.kill.by) for one in results if one.kill is not None]
    rows = [
        (
            sum(by == name for _, by in kills),
            sum(name in one.seen_by for one, _ in kills),
            sum(one.seen_by == (name,) for one, _ in kills),
            sum(one.seen_by == (name,) and one.alone for one, _ in kills),
            name,
        )
        for name in DEFAULT_ORACLES
    ]
    told = sorted((row for row in rows if row[0] or row[1]), key=lambda row: (-row[0], -row[1], row[4]))
    columns = ("oracle", "killed first", "sees the case", "no other sees it", "killed by it alone")
    yield from markdown_table(columns, [(row[4], *map(str, row[:4])) for row in told])
    yield ""
    if idle := sorted(row[4] for row in rows if not row[0] and not row[1]):
        yield f"No planted bug shows to {', '.join(idle)}."
        yield ""
    yield "| bug | found by this oracle alone |"
    yield "|---|---|"
    for one in sorted((one for one in results if one.alone), key=lambda one: (one.seen_by, one.mutant.name)):
        yield f"| {one.mutant.name}: {one.mutant.bug} | {one.seen_by[0]} |"
    if missed := [one.mutant.name for one in results if one.kill is None]:
        yield ""
        yield f"Not found: {', '.join(missed)}."


if __name__ == "__main__":
    main()
