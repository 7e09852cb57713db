"""Scores: what counts, and what each oracle adds."""

from __future__ import annotations

from pathlib import Path

from attnfuzz.mutation.mutants import Mutant
from attnfuzz.mutation.outcomes import Kill, MutantOutcome, OracleShare, Score

KILLS = (
    Kill(by="accuracy", seconds=1.0, seen_by=("accuracy", "dead_memory")),
    Kill(by="dead_memory", seconds=3.0, seen_by=("dead_memory",), alone=True),
    Kill(by="dead_memory", seconds=2.0, seen_by=("dead_memory",), alone=False),
    Kill(by="hang", seconds=9.0, seen_by=("hang",)),
)


def pair(outcome: MutantOutcome, operator: str = "store") -> tuple[Mutant, MutantOutcome]:
    return Mutant(operator, Path("file.py"), "f", 1, ("a",), ("b",), b"", ()), outcome


def score() -> Score:
    others = [pair(MutantOutcome(status=status)) for status in ("survived", "equivalent", "stillborn", "error")]
    return Score([*(pair(MutantOutcome(status="killed", kill=kill), "sign") for kill in KILLS), *others])


def test_only_mutants_that_could_be_killed_count() -> None:
    """Code that never runs, or an argument, would raise or lower the score."""
    assert score().share == 4 / 5
    assert (score().median_s, score().longest_s) == (2.5, 9.0)
    assert {name: part.share for name, part in score().by_operator().items()} == {"sign": 1.0, "store": 0.0}


def test_what_each_oracle_adds() -> None:
    """An oracle that nothing needs could not be told from one that alone finds a bug."""
    assert score().by_oracle() == [
        OracleShare("dead_memory", first=2, sees=3, only_one=2, alone=1),
        OracleShare("accuracy", first=1, sees=1, only_one=0, alone=0),
        OracleShare("hang", first=1, sees=1, only_one=1, alone=None),
    ]
