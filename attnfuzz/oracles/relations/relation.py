"""What a relation is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnfuzz.declaration import Declaration
from attnfuzz.oracles.observation import KernelRaised
from attnfuzz.oracles.relations.transformed import Changed, Results, as_it_is, results_of
from attnfuzz.oracles.trial import Trial
from attnfuzz.oracles.verdict import Failure, OracleName
from attnfuzz.problems.cases import Case
from attnfuzz.problems.registry import Contents

__all__ = ["Further", "FurtherRuns", "Relation", "one_by_one"]


@dataclass(frozen=True, slots=True)
class FurtherRuns:
    """All that a relation wants to see of a case: `runs` that are known before any of them is made, in their order.

    `compare` objects, or not, to their results beside those of the run on the case as it is. `refine` may find better
    words for its objection by runs of a trial of the case. `blame` is asked what it means that accuracy objects to one
    of `runs` whose numbers are drawn, or that it raised.
    """

    runs: Sequence[Changed]
    compare: Callable[[Results, Sequence[Results]], Failure | None]
    refine: Callable[[Trial, Failure], Failure] = lambda trial, failure: failure
    blame: Callable[[Trial, int, Failure | KernelRaised], Failure | None] = lambda trial, run, what: None


Further = Callable[[Declaration, Case, Contents], FurtherRuns | None]
"""Makes the runs of a case and what is in its tensors, on any device; None if there is nothing to be made of it."""


@dataclass(frozen=True, slots=True)
class Relation:
    """`check` runs the kernel of a trial, that all usual oracles are content with, on what it makes of the case.

    `applies` says whether there is something to be made of a case under what the kernel declares. `check` may raise
    `KernelRaised`. `weight`: how often it is drawn, compared with others; by a case from which more can be told than
    from most, perhaps more often. `by_bounds`: it sees nothing that accuracy would not see in the run that it makes,
    and so is not drawn beside it. `devices`: those on which it can judge, and `drawn_on` those on which it is drawn.
    `further`: what `check` runs and compares, if that can be done along with other cases. `alone_on`: devices on which
    it is not, since `check` does more than that. `costly_on`: devices on which it takes as long as hundreds of cases.
    `of_any_problem`: it is no law of attention, and holds for problems that users define too.
    """

    name: OracleName
    applies: Callable[[Declaration, Case], bool]
    check: Callable[[Trial], Failure | None]
    weight: int | Callable[[Declaration, Case], int] = 1
    by_bounds: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    drawn_on: tuple[str, ...] = ("cpu", "cuda")
    further: Further | None = None
    alone_on: tuple[str, ...] = ()
    costly_on: tuple[str, ...] = ()
    of_any_problem: bool = False


def one_by_one(further: Further) -> Callable[[Trial], Failure | None]:
    """The `check` that makes the runs of `further` by themselves."""

    def check(trial: Trial) -> Failure | None:
        contents = Contents(trial.reference.values_on(trial.device), None)
        wanted = further(trial.kernel.declaration, trial.case, contents)
        if wanted is None:
            return None
        failure = wanted.compare(as_it_is(trial), [results_of(trial, changed) for changed in wanted.runs])
        return None if failure is None else wanted.refine(trial, failure)

    return check
