"""Of several environments in order, the first in which a case fails, found with as few runs as that takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnfuzz.campaign.outcomes import Outcome, names_of
from attnfuzz.isolation.pythons import Python

__all__ = ["Bisection", "bisect"]


@dataclass(frozen=True, slots=True)
class Bisection:
    """``ran``: what a case came to in those of ``pythons`` in which it was run, by their number.

    ``change``: two numbers between which the case begins to fail, or to pass. Whatever lies between these ran and could
    not be judged. None if it comes to the same in the first and the last.
    """

    pythons: tuple[Python, ...]
    ran: dict[int, Outcome]
    change: tuple[int, int] | None
    target: str

    @property
    def first_failing(self) -> Python | None:
        """The first environment known to fail: all before it pass, or did not run."""
        failing = (number for number in sorted(self.ran) if self.ran[number].ending == "fails")
        number = next(failing, None)
        return None if number is None else self.pythons[number]

    def __str__(self) -> str:
        """In one sentence."""
        if self.change is not None:
            before, after = self.change
            between = [number for number in range(before + 1, after) if number in self.ran]
            then, now = self.ran[before].ending, self.ran[after].ending
            told = f"first {now} with {self._called(after)}; {then} with {self._called(before)}"
            return told + (f"; is not judged with {self._listed(between)}" if between else "")
        judged = [number for number, outcome in sorted(self.ran.items()) if outcome.ending != "is not judged"]
        failing = [number for number in judged if self.ran[number].ending == "fails"]
        if not judged:
            return f"is judged in no environment: {self.ran[0].message}"
        if not failing:
            where = "everywhere" if len(judged) == len(self.pythons) else "wherever it is judged"
            return f"passes {where}: with {self._listed(judged)}"
        if failing[0] == judged[0]:
            last = "" if failing == judged[:1] else f", as with {self._called(failing[-1])}"
            return f"already fails with {self._called(failing[0])}{last}; begin with an older environment"
        return f"fails with {self._listed(failing)}, though it passes with the first and the last"

    def _called(self, number: int) -> str:
        name, path = names_of(self.pythons, self.target)[number], str(self.pythons[number].path)
        return name if path in name else f"{name} ({path})"

    def _listed(self, numbers: Sequence[int]) -> str:
        return " and with ".join(map(self._called, numbers))


def bisect(pythons: Sequence[Python], run: Callable[[Python], Outcome], *, target: str) -> Bisection:
    """Run a case of the kernel ``target`` in the first and the last of ``pythons``, then halve those between.

    An environment in which it cannot be judged is passed over. Where it comes to the same at both ends there is nothing
    to halve: if it passes there, all others run.
    """
    ran: dict[int, Outcome] = {}

    def ending(number: int) -> str:
        if number not in ran:
            ran[number] = run(pythons[number])
        return ran[number].ending

    judged = (number for number in range(len(pythons)) if ending(number) != "is not judged")
    low = next(judged, None)
    if low is None:
        return Bisection(tuple(pythons), ran, None, target)
    high = next(number for number in reversed(range(len(pythons))) if ending(number) != "is not judged")
    if ending(low) == ending(high):
        for number in range(low, high) if ending(low) == "passes" else ():
            ending(number)
        return Bisection(tuple(pythons), ran, None, target)
    at_first = ending(low)
    while between := [number for number in range(low + 1, high) if number not in ran]:
        middle = between[len(between) // 2]
        if ending(middle) == "is not judged":
            continue
        low, high = (middle, high) if ending(middle) == at_first else (low, middle)
    return Bisection(tuple(pythons), ran, (low, high), target)
