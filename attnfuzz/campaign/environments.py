"""Compares the outcomes of one case in several environments, named by what differs: "fails with Triton 3.7.1"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from attnfuzz.environment import normalised
from attnfuzz.isolation.pythons import Python

Ending = Literal["passes", "fails", "is not judged"]
_ALWAYS_OF_INTEREST = {"python": "Python", "torch": "torch", "triton": "Triton", "numpy": "NumPy"}
"""Distributions that any kernel rests on, and what people call them."""
_MOST_OTHERS = 3


@dataclass(frozen=True, slots=True)
class EnvironmentOutcome:
    """The outcome of a case in the environment ``python``, on ``device``.

    ``symptom``: oracle and kind of a failure; ``message``: what the oracle says, or why nobody judged. A flaky case
    failed in ``failed`` of ``runs`` runs.
    """

    python: Python
    device: str
    ending: Ending
    symptom: str = ""
    message: str = ""
    failed: int = 0
    runs: int = 1


def difference(outcomes: Sequence[EnvironmentOutcome], target: str) -> str:
    """ "passes with Triton 3.6.0, fails with Triton 3.7.1", in the order of ``outcomes``; empty where all are alike."""
    groups = _alike(outcomes, target)
    if len(groups) < 2:
        return ""
    mark = "; " if any(" and " in name for names in groups.values() for name in names) else ", "
    return mark.join(f"{how} with {' and with '.join(names)}" for how, names in groups.items())


def names_of(pythons: Sequence[Python], target: str = "") -> list[str]:
    """A name for each environment that tells it from the others: the versions in which they differ.

    Those of Python, torch, Triton, NumPy and what brings the kernel ``target``; else, where these are the same in all,
    those of other packages, and at last the path.
    """
    shown = told_versions(pythons, target)
    parts = [[_with_version(name, python) for name in shown] for python in pythons]
    names = [" and ".join(filter(None, [", ".join(part[:-1]), *part[-1:]])) for part in parts]
    return [
        name if name and names.count(name) == 1 else f"{name} ({python.path})" if name else str(python.path)
        for name, python in zip(names, pythons, strict=True)
    ]


def name_of(python: Python) -> str:
    """A name for an environment by itself."""
    names = [_with_version(name, python) for name in _ALWAYS_OF_INTEREST if name in python.versions]
    return f"{', '.join(names)} ({python.path})"


def told_versions(pythons: Sequence[Python], target: str = "") -> list[str]:
    """The distributions whose versions tell the environments apart; see `names_of`."""
    all_names = {name for python in pythons for name in python.versions}
    differing = {name for name in all_names if len({python.versions.get(name) for python in pythons}) > 1}
    first = [name for name in _ALWAYS_OF_INTEREST if name in differing]
    first += sorted(name for name in differing if name not in first and _brings(name, target))
    return first or sorted(differing)[:_MOST_OTHERS]


def _alike(outcomes: Sequence[EnvironmentOutcome], target: str) -> dict[str, list[str]]:
    """The names of the environments, by what the case came to in them."""
    names = names_of([outcome.python for outcome in outcomes], target)
    symptoms = {outcome.symptom for outcome in outcomes if outcome.ending == "fails"}
    devices = {outcome.device for outcome in outcomes}
    groups: dict[str, list[str]] = {}
    for outcome, name in zip(outcomes, names, strict=True):
        how: str = outcome.ending
        if how == "fails" and len(symptoms) > 1:
            how = f"fails {outcome.symptom}"
        groups.setdefault(how, []).append(f"{name} on {outcome.device}" if len(devices) > 1 else name)
    return groups


def _brings(distribution: str, target: str) -> bool:
    """Whether the kernel ``target``, ``engine:name`` or ``module:name``, seems to be of that distribution."""
    place = target.rpartition(":")[0]
    if not place or place.endswith(".py"):
        return False
    package = normalised(place.partition(".")[0])
    return distribution == package or distribution.startswith(f"{package}-")


def _with_version(distribution: str, python: Python) -> str:
    version = python.versions.get(distribution)
    name = _ALWAYS_OF_INTEREST.get(distribution, distribution)
    return f"no {name}" if version is None else f"{name} {version}"


@dataclass(frozen=True, slots=True)
class Bisection:
    """``ran``: what a case came to in those of ``pythons`` in which it was run, by their number.

    ``change``: two numbers between which the case begins to fail, or to pass. Whatever lies between these ran and could
    not be judged. None if it comes to the same in the first and the last.
    """

    pythons: tuple[Python, ...]
    ran: dict[int, EnvironmentOutcome]
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


def bisect(pythons: Sequence[Python], run: Callable[[Python], EnvironmentOutcome], *, target: str) -> Bisection:
    """Run a case of the kernel ``target`` in the first and the last of ``pythons``, then halve those between.

    An environment in which it cannot be judged is passed over. Where it comes to the same at both ends there is nothing
    to halve: if it passes there, all others run.
    """
    ran: dict[int, EnvironmentOutcome] = {}

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
