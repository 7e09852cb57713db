"""Where an offset comes out that is kept in too few bits: plain integers."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["landings", "wrapped"]

_OFFSET_BITS = 32
_SIGNS = (False, True)


def wrapped(start: int, length: int, bits: int, *, signed: bool) -> Iterator[tuple[int, int]]:
    """``range(start, start + length)`` in a type of so many bits: pieces of consecutive numbers, (start, length)."""
    lowest, period = (-(1 << bits - 1) if signed else 0), 1 << bits
    while length > 0:
        lands = (start - lowest) % period + lowest
        piece = min(length, lowest + period - lands)
        yield lands, piece
        start, length = start + piece, length - piece


def landings(start: int, length: int, itemsize: int) -> set[tuple[int, int]]:
    """Where elements ``start`` and on are looked for if offsets are 32 bits wide, in elements or bytes, of either sign.

    Pieces (start, length) in elements that begin elsewhere than what they stand for, perhaps below 0.
    """
    found = set()
    for signed in _SIGNS:
        for unit in (1, itemsize):
            at = start
            for lands, piece in wrapped(start * unit, length * unit, _OFFSET_BITS, signed=signed):
                if lands != at * unit:
                    found.add((lands // unit, piece // unit))
                at += piece // unit
    return found
