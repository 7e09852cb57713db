"""Scores: what counts, and what killed."""

from __future__ import annotations

from pathlib import Path

from attnfuzz.mutation.mutants import Kill, Mutant, MutantOutcome, Score

KILLS = (
    Kill(by="accuracy", seconds=1.0),
    Kill(by="dead_memory", seconds=3.0),
    Kill(by="dead_memory", seconds=2.0),
    Kill(by="hang", seconds=9.0),
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
