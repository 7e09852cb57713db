"""Outcomes of mutants, as they are measured, written as JSON and shown, and figures over many of them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from attnfuzz.mutation.mutants import Mutant
from attnfuzz.verdict import Failure

Status = Literal["killed", "survived", "equivalent", "stillborn", "error"]


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """How a mutant was found, ``seconds`` after the hunt for it began, as the last of ``cases`` cases.

    The failure was seen ``first_seen_s`` after that; the rest went into having it come back in a fresh process.
    A command that kills leaves only ``by`` and ``seconds``.
    """

    by: str
    seconds: float
    first_seen_s: float = 0.0
    kernel: str = ""
    cases: int = 0
    case: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None
    flaky: bool = False


class MutantOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one mutant.

    ``detail`` says why it is equivalent, stillborn or an error. ``cases`` were judged in ``seconds``. ``wrongly`` is
    set on a kill of a mutant that is listed as equivalent.
    """

    status: Status
    seconds: float = 0.0
    cases: int = 0
    kill: Kill | None = None
    detail: str = ""
    wrongly: bool = False


Pair = tuple[Mutant, MutantOutcome]


class Score:
    """Figures over mutants and their outcomes."""

    def __init__(self, outcomes: Iterable[Pair]) -> None:
        self.outcomes: Sequence[Pair] = tuple(outcomes)

    def of(self, status: Status) -> list[Pair]:
        """The mutants of which that became."""
        return [pair for pair in self.outcomes if pair[1].status == status]

    @cached_property
    def counts(self) -> Counter[Status]:
        """How many mutants there are of each status."""
        return Counter(outcome.status for _, outcome in self.outcomes)

    @property
    def share(self) -> float:
        """Killed mutants among those that run and are not equivalent, from 0 to 1; 1 if there are none."""
        killed, survived = self.counts["killed"], self.counts["survived"]
        return killed / (killed + survived) if killed + survived else 1.0

    @cached_property
    def kills(self) -> list[Kill]:
        """All kills."""
        return [outcome.kill for _, outcome in self.of("killed") if outcome.kill is not None]

    @property
    def median_s(self) -> float:
        """Half of the killed mutants were killed within so many seconds; 0 without any."""
        return statistics.median(kill.seconds for kill in self.kills) if self.kills else 0.0

    @property
    def longest_s(self) -> float:
        """All killed mutants were killed within so many seconds."""
        return max((kill.seconds for kill in self.kills), default=0.0)

    def by_operator(self) -> dict[str, Score]:
        """The score of each operator's mutants, by its name."""
        names = sorted({mutant.operator for mutant, _ in self.outcomes})
        return {name: Score(pair for pair in self.outcomes if pair[0].operator == name) for name in names}

    def by_killer(self) -> list[tuple[str, int]]:
        """How many mutants each oracle killed, or a command or its time limit, the most first."""
        return Counter(kill.by for kill in self.kills).most_common()
