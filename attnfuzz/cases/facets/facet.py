"""A facet of a case: a few fields that mean one thing, with all that is said of them in one place. Torch-free."""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from attnfuzz.problems.choices import is_power_of_two
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.fields import Field, Integer, Proposal, Seed
from attnfuzz.problems.module import Problem, module_of
from attnfuzz.problems.open_cases import OpenCase, OpenProblem
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import OptionValue, Supports, as_written

C = TypeVar("C", bound=msgspec.Struct)
Changes = Mapping[str, Any]
"""Other values of fields, by name."""
Change = tuple[str, Changes]
"""A difference in words, and the change that makes it."""
Options = Mapping[str, tuple[OptionValue, ...]]
Levels = tuple[str, ...]

_MOST_LISTED = 8


class SizeRank(enum.IntEnum):
    """Where something counts in the order of simplicity: what a reader must keep in mind comes first."""

    SEQUENCES = 0
    HEADS = 1
    TOKENS = 2
    HEAD_SIZE = 3
    QUERIES = 4
    STORAGE = 5
    DTYPE = 6
    STRIDES = 7
    OPTIONS = 8
    CONTENTS = 9
    EACH_TOKEN = 10
    EACH_STRIDE = 11


@dataclass(frozen=True)
class Domain:
    """The cases that may be proposed: those of a kernel that declares ``supports`` and choices of ``options``."""

    problem: Problem
    supports: Supports
    options: Options

    @functools.cached_property
    def simplest(self) -> Any:
        """The minimum that shrinking can reach."""
        return simplest_case(self.problem, self.supports, self.options)


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of the input space: ``of`` a case (or of one of its rows) says on which of ``levels`` it lies.

    A level is a word in a report ("pow2 to 16"). Where a case has several (strides of K and of V), it lies on all.
    """

    name: str
    levels: Levels
    of: Callable[[Any], Levels]

    @property
    def features(self) -> tuple[Feature, ...]:
        """One for each level, which says that a case lies on it."""
        return tuple(Feature(self.name, f"={level}") for level in self.levels)


@dataclass(frozen=True, slots=True)
class Part:
    """One plain number or choice of a facet, at ``path`` in a case (``pages.order``), of a ``kind``.

    ``feature``: what any other value than the simplest is, with ``{}`` for it; as its kind has it if None.
    ``words``: what is told of a change to the value ``{}``. ``axis``: the name of an axis with a level for each value.
    ``tries_others``: whether another value in place of this one, and not only the simplest, says what a bug needs.
    ``supports``: the field of `Supports` that limits it.
    """

    path: str
    kind: Field
    place: SizeRank
    feature: Feature | None = None
    words: str = ""
    axis: str = ""
    tries_others: bool = False
    supports: str = ""

    def value_in(self, case: Any) -> Any:
        for name in self.path.split("."):
            case = getattr(case, name)
        return case

    def put(self, case: Any, value: Any) -> Changes:
        """The changes that another value makes."""
        field, _, inner = self.path.partition(".")
        return {field: msgspec.structs.replace(getattr(case, field), **{inner: value}) if inner else value}

    def features(self, case: Any) -> Iterator[Feature]:
        value = self.value_in(case)
        if self.feature is None:
            yield from self.kind.features(self.path, value)
        elif value != self.kind.simplest:
            yield self.feature.with_value(value)

    def traits(self, case: Any) -> Iterator[Feature]:
        return self.kind.traits(self.path.rpartition(".")[2], self.value_in(case))

    def shrink(self, case: C) -> Proposal[C]:
        return self.kind.shrink(case, self.value_in(case), lambda case, value: changed(case, **self.put(case, value)))

    def changes(self, case: Any) -> Iterator[Change]:
        now = self.value_in(case)
        others = (*self.kind.simpler(now), *self.kind.others(now)) if self.tries_others else (self.kind.simplest,)
        for value in dict.fromkeys(others):
            if value != now:
                words = (self.words or f"{self.path} {{}}").format(_told(value))
                yield f"{words} instead of {_told(now)}", self.put(case, value)

    def alternatives(self, case: Any, simplest: Any) -> Iterator[Changes]:
        now, plain = self.value_in(case), self.value_in(simplest)
        if self.tries_others and now != plain:
            others = dict.fromkeys((*self.kind.simpler(now), *self.kind.others(now)))
            yield from (self.put(case, value) for value in others if value not in (now, plain))

    def objections(self, case: Any, supports: Supports) -> Iterator[str]:
        if self.supports:
            yield from not_among(self.path, self.value_in(case), getattr(supports, self.supports))

    def axes(self) -> Iterator[Axis]:
        if self.axis:
            yield Axis(self.axis, self.kind.levels, lambda case: (self.kind.level(self.value_in(case)),))


class Facet(Generic[C]):
    """All that attnfuzz says of the ``fields`` of a case of type ``C``.

    Where these are plain numbers and choices, their ``parts`` say it; a facet overrides what it says otherwise.
    """

    fields: tuple[str, ...] = ()
    """The fields of a case that this facet owns; taken from the simplest case together."""
    parts: tuple[Part, ...] = ()
    jumps_with: ClassVar[str] = ""
    """Facets of one word seldom matter together: shrinking jumps to the simplest of them all. "" for no jump."""
    asked: ClassVar[int] = 1
    """When ablation asks for its changes: 0 for what tells most, 2 for what it tries last."""

    def features(self, case: C) -> Iterator[Feature]:
        """Features for values that are not the simplest."""
        for part in self.parts:
            yield from part.features(case)

    def told(self, case: C) -> Iterator[str]:
        """Words for the one line that names a case."""
        yield from ()

    def general(self, case: C, domain: Domain) -> Iterator[Feature]:
        """Features that all cases of one mistake share, whichever of them is met first."""
        yield from ()

    def unusual_values(self, case: C, domain: Domain) -> Iterator[Feature]:
        """Common values that ``case`` deviates from, as `other_than`; `without` puts them into it."""
        yield from ()

    def traits(self, case: C) -> Iterator[Feature]:
        """Features of any value, from which is learned which cases kill a kernel's process."""
        for part in self.parts:
            yield from part.traits(case)

    def draws(self, supports: Supports) -> Mapping[str, Sequence[Any]]:
        """Values to draw for fields that go with any others, simplest first; one listed twice is twice as likely."""
        return {}

    def axes(self, domain: Domain) -> Iterator[Axis]:
        """Axes of the input space of a kernel."""
        for part in self.parts:
            yield from part.axes()

    def row_axes(self, domain: Domain) -> Iterator[Axis]:
        """Axes of one of the ``rows``."""
        yield from ()

    def rows(self, case: C) -> Iterable[Any]:
        """The parts of a case, each by itself: its distinct sequences, or pairs of states."""
        return ()

    def objections(self, case: C, domain: Domain) -> Iterator[str]:
        """A sentence on each value that a kernel does not declare."""
        for part in self.parts:
            yield from part.objections(case, domain.supports)

    def size(self, case: C, options: Options) -> Iterator[tuple[SizeRank, Any]]:
        """Sizes by rank: of two cases, the simpler has the smaller ones."""
        for part in self.parts:
            yield part.place, part.kind.rank(part.value_in(case))

    def shrink(self, case: C, domain: Domain) -> Proposal[C]:
        """Propose simpler values; returns the smallest case that was accepted."""
        for part in self.parts:
            case = yield from part.shrink(case)
        return case

    def simplest(self, case: C, domain: Domain) -> Changes:
        """Changes that make all of the facet simplest and leave the rest as it is."""
        return {name: getattr(domain.simplest, name) for name in self.fields}

    def changes(self, case: C, domain: Domain) -> Iterator[Change]:
        """Single changes that may make a failing case pass."""
        for part in self.parts:
            yield from part.changes(case)

    def alternatives(self, case: C, domain: Domain) -> Iterator[Changes]:
        """Other values in place of one that is not the simplest: what fails alike does not need that value."""
        for part in self.parts:
            yield from part.alternatives(case, domain.simplest)

    def without(self, feature: Feature, case: C, domain: Domain) -> Iterator[Changes]:
        """Ways to take ``feature`` away from a case and leave all the rest."""
        yield from ()

    def follow(self, case: C, changes: Changes) -> Changes:
        """Further changes of the facet's fields that follow when other fields change."""
        return {}


def facets_of(case_type: type[Any]) -> tuple[Facet[Any], ...]:
    """The facets that its problem names; of a user's problem each field is one."""
    problem: Problem = case_type.problem
    return _of_fields(problem) if isinstance(problem, OpenProblem) else module_of(problem).facets


def changed(case: C, **fields: Any) -> C | None:
    """``case`` with other values of ``fields`` and what follows of them; None where the case type forbids it.

    A scale of ``1/sqrt(head_size)`` follows the head size, needles their tokens, query tokens their sequences, and
    strides go with their tensors.
    """
    for facet in facets_of(type(case)):
        fields |= facet.follow(case, fields)
    try:
        return msgspec.structs.replace(case, **fields)
    except ValueError:  # such as a head size that the packed layout cannot hold
        return None


_SEEDS_TRIED = 4
"""Seeds that are tried for a case with other numbers."""


class _OpenField(Facet[OpenCase]):
    """A field of a user's problem, of which nothing but its kind is known."""

    def __init__(self, name: str, kind: Field) -> None:
        self.fields = (name,)
        self.parts = (Part(name, kind, SizeRank.SEQUENCES, axis=name, tries_others=True),)

    def alternatives(self, case: OpenCase, domain: Domain) -> Iterator[Changes]:
        """As of any facet, and the case with what this number is above the simplest added to another one instead.

        Where several numbers add up to one length, which of them is large says nothing of a mistake; where other
        numbers are drawn for the case then, one seed may show it and another not.
        """
        yield from super().alternatives(case, domain)
        (name,), (part,) = self.fields, self.parts
        kind, fields = part.kind, type(case).problem.fields
        if not isinstance(kind, Integer) or (more := getattr(case, name) - kind.low) <= 0:
            return
        seeds = [other for other, its in fields.items() if isinstance(its, Seed)]
        counts = {other: its for other, its in fields.items() if other != name and isinstance(its, Integer)}
        for other, its in counts.items():
            if getattr(case, other) == its.low and its.low + more <= its.high:
                moved = {name: kind.low, other: its.low + more}
                yield moved
                yield from (moved | {seed: value} for seed, value in itertools.product(seeds, range(1, _SEEDS_TRIED)))


@functools.lru_cache(maxsize=256)
def _of_fields(problem: OpenProblem) -> tuple[Facet[Any], ...]:
    from attnfuzz.cases.facets.storage import KernelOptions

    return (*(_OpenField(name, kind) for name, kind in problem.fields.items()), KernelOptions())


def _told(value: object) -> str:
    return value if isinstance(value, str) else as_written(value)


@functools.lru_cache(maxsize=4096)
def size_class(value: int, limits: tuple[int, ...]) -> str:
    """``value`` by size and by whether it is a power of two."""
    if value == 1:
        return "1"
    kind = "pow2" if is_power_of_two(value) else "other"
    above = [limit for limit in limits if value <= limit]
    return f"{kind} to {above[0]}" if above else f"{kind} over {limits[-1]}"


def classes(limits: tuple[int, ...]) -> Levels:
    """Every ``size_class``: powers of two first."""
    sizes = (*(f"to {limit}" for limit in limits), f"over {limits[-1]}")
    return ("1", *(f"pow2 {size}" for size in sizes), *(f"other {size}" for size in sizes))


def other_than(name: str, value: int) -> Feature:
    """The feature of any other value, where kernels are often written for this one.

    That a case has it means nothing until the case with ``value`` passes.
    """
    return Feature(name, f" other than {value}", "other")


def listed(numbers: tuple[int, ...]) -> str:
    """The first few of them."""
    return ", ".join(map(str, numbers[:_MOST_LISTED])) + (", ..." if len(numbers) > _MOST_LISTED else "")


def not_among(name: str, value: object, allowed: tuple[object, ...] | None) -> Iterator[str]:
    """An objection to a ``value`` that is not declared; None declares any."""
    if allowed is not None and value not in allowed:
        yield f"{name}={value!r}, but the kernel declares {allowed}"
