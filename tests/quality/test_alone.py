"""The table of what each oracle adds."""

from __future__ import annotations

from attnfuzz.mutation.outcomes import Kill, MutantOutcome
from attnfuzz.oracles.registry import OracleName
from tests.quality.alone import page
from tests.quality.mutants import MUTANTS


def killed(by: OracleName, *others: OracleName, alone: bool | None = None) -> MutantOutcome:
    return MutantOutcome(status="killed", kill=Kill(by=by, seconds=1.0, seen_by=(by, *others), alone=alone))


def test_only_what_nothing_else_finds_counts_for_an_oracle_alone() -> None:
    """An oracle that another one stands in for would look indispensable, or one that nothing replaces idle."""
    outcomes = (
        killed("page_relocation", alone=True),
        killed("accuracy", alone=False),  # other cases showed it to another oracle
        killed("dead_memory", "accuracy"),
        MutantOutcome(status="survived"),
    )
    lines = list(page(list(zip(MUTANTS, outcomes, strict=False))))
    assert "| page_relocation | 1 | 1 | 1 | 1 |" in lines
    assert "| accuracy | 1 | 2 | 1 | 0 |" in lines
    assert "| dead_memory | 1 | 1 | 0 | 0 |" in lines
    assert [line for line in lines if line.endswith("| page_relocation |")] == [
        f"| {MUTANTS[0].name}: {MUTANTS[0].bug} | page_relocation |"
    ]
    assert "No planted bug shows to " in "".join(lines)
    assert lines[-1] == f"Not found: {MUTANTS[3].name}."
