"""An explanation of a failing case, to say and to draw: the data that travels from the executor to the driver."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from attnfuzz.untrusted_text import NAME_BYTES, printable, printable_lines
from attnfuzz.verdict import Blame, Cause, Failure, SourceLine, where_to_look

NO_TIME = "(there was no time to find out more)"
_MOST_TOLD = 2
"""Causes that are told where nothing tells them apart."""


def in_words(causes: Iterable[Cause]) -> str:
    """Join what all of these say, and which part of any case it is about if known; empty if they say too much."""
    listed = list(causes)
    words, rules = (list(dict.fromkeys(getattr(one, name) for one in listed)) for name in ("words", "rule"))
    if not 0 < len(words) <= _MOST_TOLD:
        return ""
    return f"{words[0]} ({rules[0]})" if len(words) == len(rules) == 1 and rules[0] else ", or ".join(words)


def in_a_similar_case(one: Cause) -> Cause:
    """A cause of which the case at hand says nothing, with words on the one that does."""
    return msgspec.structs.replace(one, words=f"in a similar case, {one.words}", tokens=())


class WeightBox(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Weights of places that lie together, one for each of ``numbers``: offsets or rows, as ``unit`` says.

    ``got`` is None where it is no number.
    ``skipped``: the box stands for that many pages whose weights are right.
    """

    title: str
    unit: str = ""
    numbers: tuple[int, ...] = ()
    got: tuple[float | None, ...] = ()
    expected: tuple[float, ...] = ()
    wrong: tuple[bool, ...] = ()
    skipped: int = 0

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "title", printable(self.title, NAME_BYTES))
        msgspec.structs.force_setattr(self, "unit", printable(self.unit, NAME_BYTES))


class WeightedRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row of the output, and what it is made of. ``wrong``: whether that is not what it should be made of."""

    title: str
    wrong: bool
    boxes: tuple[WeightBox, ...]

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "title", printable(self.title))


class Explanation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``lines`` say what is wrong, the most general first; ``rows`` are weights to draw, the most telling first.

    ``blame``: what they point to. ``sources``: the lines of the kernel that the failure's cause comes from.
    ``changes``: which single changes of the case make it pass, and which do not. ``runs``: of the kernel, for the rest.
    ``causes``: the mistakes that give all measured weights; None where none were measured, or all are right.
    ``told``: the failure as it is told once neighbouring cases have been asked which mistake it is.
    """

    lines: tuple[str, ...] = ()
    rows: tuple[WeightedRow, ...] = ()
    blame: Blame = Blame()
    changes: tuple[str, ...] = ()
    runs: int = 0
    sources: tuple[SourceLine, ...] = ()
    causes: tuple[Cause, ...] | None = None
    told: Failure | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "lines", printable_lines(self.lines))
        msgspec.structs.force_setattr(self, "changes", printable_lines(self.changes))

    @property
    def all_lines(self) -> tuple[str, ...]:
        """Where to look, ``lines``, then ``changes``."""
        return where_to_look(self.sources) + self.lines + self.changes
