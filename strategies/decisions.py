"""Everything that is decided about one drawn value, read from a single byte string.

Hypothesis follows each generated test case with up to five mutants that copy one choice over another of the same kind.
Made of some thirty small choices, six cases in a row would share most of their fields. A test case that is one choice
has nothing to copy within, so every case is new, and drawing it costs a third. It shrinks byte by byte towards zero,
the simplest option everywhere, and because each part of a case reads its own bytes, none shifts when another shrinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Decisions:
    """Reads a byte string, one byte for each decision; past its end every decision is the simplest."""

    __slots__ = ("_data", "_next")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._next = 0

    def pick(self, options: Sequence[T]) -> T:
        """One of ``options``, simplest first; what is listed twice is twice as likely. Only 256 are told apart."""
        byte = self._data[self._next] if self._next < len(self._data) else 0
        self._next += 1
        return options[byte * len(options) >> 8]

    def pick_rarely(self, usual: Sequence[T], rare: Sequence[T], *, weight: int) -> T:
        """One of both, each of ``usual`` ``weight`` times as likely as one of ``rare``, which come last."""
        of_usual = weight * len(usual)
        place = self.pick(range(of_usual + len(rare)))
        return usual[place // weight] if place < of_usual else rare[place - of_usual]

    def part(self, size: int) -> Decisions:
        """The next ``size`` bytes, to decide about one part of the value."""
        start = self._next
        self._next += size
        return Decisions(self._data[start : start + size])


def decided(build: Callable[[Decisions], T], *, size: int) -> st.SearchStrategy[T]:
    """The value that ``build`` makes of ``size`` bytes."""
    return st.binary(min_size=size, max_size=size).map(lambda data: build(Decisions(data)))


def decided_together(build: Callable[[Decisions], T], *, size: int, count: int) -> st.SearchStrategy[list[T]]:
    """The values that ``build`` makes of ``count`` times ``size`` bytes.

    For drawing many values without shrinking them: most of what a draw costs, it costs once.
    """

    def cut(data: bytes) -> list[T]:
        return [build(Decisions(data[start : start + size])) for start in range(0, count * size, size)]

    return st.binary(min_size=count * size, max_size=count * size).map(cut)
