"""Features of a case that a bug may need, as data: made by facets, told in words, compared by value. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

Role = Literal["part", "empty", "other", "size", "place", "surroundings", "numbers", "scores"]
"""What a feature says of a bug that needs it:

- ``part``: the part of a kernel that is wrong: a type, a layout, a mask, an option;
- ``empty``: a part, too: what becomes of rows that have no keys, or no token;
- ``other``: a part, if the case with the value that it has not passes: only a run of that tells;
- ``size``: nothing much, since every bug may need several tokens, heads or pages;
- ``place`` and ``surroundings``: what lies at a wrong address; the first are where pages lie;
- ``numbers`` make an error visible more often than they cause it; ``scores`` that are large or small may be the cause.
"""


class Feature(msgspec.Struct, frozen=True, order=True, omit_defaults=True, forbid_unknown_fields=True, cache_hash=True):
    """One feature: what ``field`` of a case is (``=bfloat16``, ``>1``, `` not pow2``); or that something holds, without
    ``value``.

    ``str()`` gives the words, which are stable: saved findings are told apart by them.
    """

    field: str
    value: str = ""
    role: Role = "part"

    def __str__(self) -> str:
        return self.field + self.value

    @classmethod
    def read(cls, words: str) -> Feature:
        """The feature that is called so, where nothing else is known of it: a field with its value, or that something
        holds."""
        field, equals, value = words.partition("=")
        return cls(field, equals + value)

    @property
    def level(self) -> str:
        """The value by itself, as it is told beneath the name of its field."""
        return self.value.removeprefix("=")

    def with_value(self, value: object) -> Feature:
        """The feature with ``value``, which takes the place of ``{}``."""
        return Feature(self.field, self.value.replace("{}", str(value)), self.role)

    @property
    def general(self) -> Feature | None:
        """The feature of a field with any other value than the simplest; None where no value is named."""
        return Feature(self.field, "", self.role) if self.value.startswith("=") else None


def words_of(features: Iterable[Feature]) -> Iterator[str]:
    """In the order in which they are told."""
    yield from sorted(map(str, features))
