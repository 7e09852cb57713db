"""A facet of a case: a few fields that mean one thing, with all that is said of them in one place. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from attnfuzz.cases.domain import Domain
from attnfuzz.cases.search import Proposal
from attnfuzz.problems.axes import Axis

__all__ = ["Changes", "Facet"]

C = TypeVar("C", bound=msgspec.Struct)
Changes = Mapping[str, Any]
"""Other values of fields, by name."""


class Facet(Generic[C]):
    """All that attnfuzz says of the ``fields`` of a case of type ``C``; a facet overrides what applies to it.

    Words are stable: saved findings are told apart by them.
    """

    fields: ClassVar[tuple[str, ...]]
    """The fields of a case that this facet owns; taken from the simplest case together."""

    def features(self, case: C) -> Iterator[str]:
        """Names of what is away from the simplest value."""
        yield from ()

    def size(self, case: C) -> tuple[Any, ...]:
        """What is compared to tell the simpler of two cases: the smaller is the simpler."""
        return ()

    def axes(self, domain: Domain) -> Iterator[Axis]:
        """Axes of the input space of a kernel that declares ``domain``."""
        yield from ()

    def objections(self, case: C, domain: Domain) -> Iterator[str]:
        """A sentence on each value that a kernel with this ``domain`` does not declare."""
        yield from ()

    def lower(self, case: C, domain: Domain) -> Proposal[C]:
        """Propose simpler values; returns the smallest case that was accepted."""
        yield from ()
        return case

    def changes(self, case: C, domain: Domain) -> Iterator[tuple[str, C | None]]:
        """Single changes that may make a failing case pass, each with words for what differs."""
        yield from ()

    def without(self, feature: str, case: C) -> Iterator[Changes]:
        """Ways to take ``feature`` away from a case and leave all the rest."""
        yield from ()
