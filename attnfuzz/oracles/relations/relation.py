"""What a relation is made of."""

from collections.abc import Callable
from dataclasses import dataclass

from attnfuzz.declaration import Declaration
from attnfuzz.oracles.trial import Trial
from attnfuzz.oracles.verdict import Failure, OracleName
from attnfuzz.problems.cases import Case

__all__ = ["Relation"]


@dataclass(frozen=True, slots=True)
class Relation:
    """`check` runs the kernel of a trial, that all usual oracles are content with, on what it makes of the case.

    `applies` says whether there is something to be made of a case under what the kernel declares. `check` may raise
    `KernelRaised`. `weight`: how often it is drawn, compared with others. `by_bounds`: it sees nothing that accuracy
    would not see in the run that it makes, and so is not drawn beside it. `devices`: those on which it can judge.
    """

    name: OracleName
    applies: Callable[[Declaration, Case], bool]
    check: Callable[[Trial], Failure | None]
    weight: int = 1
    by_bounds: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
