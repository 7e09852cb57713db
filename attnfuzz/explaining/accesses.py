"""Which lines of a kernel touch a tensor, and how: what an access outside, or of the wrong memory, comes from.

`attnfuzz.triton_compat.interpreter_accesses` writes accesses down as they happen; of what Triton has compiled for a
GPU, `accesses_of_ttir` reads which there are. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from attnfuzz.explaining.operations import MOST_LINES, SourcePlace
from attnfuzz.mistake import NARROW_OFFSETS, READ_BEFORE_WRITTEN
from attnfuzz.verdict import Failure

Question = Literal["touched", "narrow", "stored", "stray", "unwritten"]
"""What touches a tensor; which offsets are computed in 32 bits; what writes a tensor; what writes around one, or else
within; what reads a result too early."""
AROUND = "(around a tensor)"
"""In place of a tensor's name: red zones, which no line should touch."""


@dataclass(frozen=True, slots=True)
class Access:
    """A line that reads or writes the tensor of a name.

    ``narrow``: where its offset was computed in 32 bits, of which more would have been needed, as far as is known.
    ``unwritten``: it read what nobody had written.
    """

    kind: Literal["load", "store"]
    tensor: str
    place: SourcePlace
    narrow: SourcePlace | None = None
    unwritten: bool = False


def question_of(failure: Failure) -> Question | None:
    """Say what to ask of the accesses of a kernel that failed; None if they have nothing to do with it."""
    if failure.cause == NARROW_OFFSETS:
        return "narrow"
    if failure.oracle == "unwritten":
        return "unwritten" if failure.cause == READ_BEFORE_WRITTEN else "stored"
    if failure.oracle == "red_zone":
        return "stray"
    return "touched" if failure.oracle == "guard_page" and failure.tensor else None


def lines_of(question: Question, tensors: Collection[str], accesses: Iterable[Access]) -> tuple[SourcePlace, ...]:
    """The lines that answer ``question`` on ``tensors``, any of them if there are none; of more than a few, none."""
    accesses = list(accesses)
    mine = [one for one in accesses if not tensors or one.tensor in tensors]
    if question == "stray":
        mine = [one for one in accesses if one.tensor == AROUND] or mine
    if question == "narrow":
        places = [one.narrow for one in mine if one.narrow is not None]
    elif question == "unwritten":
        places = [one.place for one in mine if one.unwritten][:1]  # later ones may read what was made of it
    else:
        places = [one.place for one in mine if question == "touched" or one.kind == "store"]
    found = tuple(dict.fromkeys(places))
    return found if len(found) <= MOST_LINES else ()
