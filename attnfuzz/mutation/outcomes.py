"""What became of mutants, as it is measured, written as JSON and shown, and figures over many of them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import msgspec

from attnfuzz.mutation.mutants import Mutant
from attnfuzz.oracles.registry import OracleName
from attnfuzz.verdict import Failure

__all__ = ["Kill", "MutantOutcome", "OracleShare", "Score", "Status"]


Status = Literal["killed", "survived", "equivalent", "stillborn", "error"]


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """How a mutant was found, ``seconds`` after the hunt for it began, as the last of ``cases`` cases.

    The failure was seen ``first_seen_s`` after that; the rest went into having it come back in a fresh process.
    ``seen_by``: the oracles that object to ``case`` when each is asked alone. ``alone``: whether the mutant survives a
    hunt without the only one of them; None if that was not tried. A command that kills leaves only ``by`` and
    ``seconds``.
    """

    by: str
    seconds: float
    first_seen_s: float = 0.0
    kernel: str = ""
    cases: int = 0
    case: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None
    flaky: bool = False
    seen_by: tuple[OracleName, ...] = ()
    alone: bool | None = None

    @property
    def is_untried_alone(self) -> bool:
        """Whether one oracle alone sees the case, and no hunt without it was made."""
        return len(self.seen_by) == 1 and self.alone is None


class MutantOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one mutant.

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


@dataclass(frozen=True, slots=True)
class OracleShare:
    """Mutants that an oracle killed ``first``, whose case it ``sees``, and that it killed ``alone``.

    ``only_one``: those whose case no other oracle sees; ``alone`` those of them that survive a hunt without it, None if
    there was none.
    """

    name: str
    first: int
    sees: int
    only_one: int
    alone: int | None


class Score:
    """Of mutants with what became of them."""

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

    def by_oracle(self) -> list[OracleShare]:
        """What each oracle did, those that killed most first."""
        names = {kill.by for kill in self.kills} | {name for kill in self.kills for name in kill.seen_by}
        return sorted(map(self._share_of, names), key=lambda share: (-share.first, -share.sees, share.name))

    def _share_of(self, name: str) -> OracleShare:
        only = [kill for kill in self.kills if kill.seen_by == (name,)]
        tried = [kill.alone for kill in only if kill.alone is not None]
        return OracleShare(
            name=name,
            first=sum(kill.by == name for kill in self.kills),
            sees=sum(name in kill.seen_by for kill in self.kills),
            only_one=len(only),
            alone=sum(tried) if tried or not only else None,
        )
