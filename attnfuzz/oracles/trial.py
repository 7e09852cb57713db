"""A case on a kernel: the runs that oracles compare, each made when first asked for."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool
from torch import Tensor

from attnfuzz.declaration import Kernel
from attnfuzz.memory.patterns import Fill, bits, holds_prefill
from attnfuzz.oracles.comparison import Comparison, Reference, compare, worst_ratio
from attnfuzz.oracles.observation import Observation, observe
from attnfuzz.problems.cases import Case
from attnfuzz.problems.tolerance import Tolerance

__all__ = ["Symptoms", "Trial"]


@dataclass(frozen=True, slots=True)
class Symptoms:
    """What is wrong with the first two runs, before any cause is looked for.

    `damaged`: per run, whether memory changed that may not. `unwritten`: an element still holds pre-fill. `differs`:
    the runs disagree. `error_ratio`: the largest error over bound of the first run.
    """

    damaged: tuple[bool, ...]
    unwritten: bool
    differs: bool
    error_ratio: float

    def any(self) -> bool:
        """Whether anything is wrong."""
        return any(self.damaged) or self.unwritten or self.differs or self.error_ratio > 1


class Trial:
    """Runs and reference of `case` on `kernel`, cached."""

    def __init__(self, kernel: Kernel, case: Case, *, device: str, tolerance: Tolerance, twice: bool = True) -> None:
        """`twice`: whether there is a second run."""
        self.kernel = kernel
        self.case = case
        self.device = device
        self.twice = twice
        self.reference = Reference(kernel.declaration, case, device=device, tolerance=tolerance)
        self.observations: list[Observation] = []

    @cached_property
    def first(self) -> Observation:
        """Everything NaN that is dead or not written yet."""
        return self._observe("nan", "nan")

    @cached_property
    def second(self) -> Observation | None:
        """Everything finite: equal bits in `first` say that nothing dead or unwritten was used."""
        return self._observe("finite", "finite") if self.twice else None

    @cached_property
    def repeated(self) -> Observation:
        """As `first`."""
        return self._observe("nan", "nan")

    @cached_property
    def prefilled_otherwise(self) -> Observation:
        """As `first`, except for what outputs and workspaces held."""
        return self._observe("nan", "finite")

    def look_closer(self) -> None:
        """Make the second run after all, upon symptoms in the first."""
        self.twice = True
        for cached in ("second", "symptoms"):
            self.__dict__.pop(cached, None)

    @property
    def runs(self) -> list[Observation]:
        """The first run and, if there is one, the second."""
        first = self.first  # before the second one
        return [first] if self.second is None else [first, self.second]

    @cached_property
    def comparison(self) -> list[Comparison]:
        """The first run against the reference."""
        return self.compare(self.first)

    def compare(self, seen: Observation) -> list[Comparison]:
        """A run against the reference."""
        return compare(self.reference, seen)

    @cached_property
    def symptoms(self) -> Symptoms:
        """One look at everything, for one wait for the device. No run may have raised."""
        damaged = [mark for seen in self.runs for mark in (seen.given.damage(), seen.allocated.damage())]
        differs = self.disagree(self.first, self.second) if self.second else torch.zeros_like(damaged[0])
        flags = torch.stack([*damaged, _unwritten(self.first), differs, worst_ratio(self.comparison)]).tolist()
        *marks, unwritten, different, error_ratio = flags
        per_run = tuple(bool(marks[i] or marks[i + 1]) for i in range(0, len(marks), 2))
        return Symptoms(per_run, bool(unwritten), bool(different), error_ratio)

    def disagree(self, one: Observation, other: Observation) -> Bool[Tensor, ""]:
        """Whether two runs gave different bits; of a kernel that declares itself nondeterministic, other NaNs."""
        return torch.stack([mask.any() for mask in self.differences(one, other).values()]).any()

    def differences(self, one: Observation, other: Observation) -> dict[str, Bool[Tensor, "..."]]:
        """`disagree`, for each element of each result."""
        by_bits = self.kernel.declaration.supports.deterministic
        return {name: _differs(part, other.results[name], by_bits=by_bits) for name, part in one.results.items()}

    def _observe(self, poison: Fill, prefill: Fill) -> Observation:
        seen = observe(
            self.kernel, self.case, self.reference.values, device=self.device, poison=poison, prefill=prefill
        )
        self.observations.append(seen)
        return seen


def _differs(one: Tensor, other: Tensor, *, by_bits: bool) -> Bool[Tensor, "..."]:
    if by_bits and one.dtype == other.dtype:
        return bits(one) != bits(other)
    return one.isnan() != other.isnan()


def _unwritten(seen: Observation) -> Bool[Tensor, ""]:
    return torch.stack([holds_prefill(result, seen.prefill).any() for result in seen.results.values()]).any()
