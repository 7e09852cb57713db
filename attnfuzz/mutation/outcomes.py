"""What became of mutants: data that is measured, written as JSON and shown."""

from __future__ import annotations

from typing import Literal

import msgspec

from attnfuzz.oracles.verdict import Failure, OracleName

__all__ = ["Kill", "Outcome", "Status"]

Status = Literal["killed", "survived", "equivalent", "stillborn", "error"]


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """How a mutant was found, ``seconds`` after the hunt for it began, as the last of ``cases`` cases.

    The failure was seen ``first_seen_s`` after that; the rest went into having it come back in a fresh process.
    ``seen_by``: the oracles that object to ``case`` when each is asked alone. ``alone``: whether the mutant survives a
    hunt without the only one of them; None if that was not tried. A command that kills leaves only ``by`` and
    ``seconds``.
    """

    by: str
    seconds: float
    first_seen_s: float = 0.0
    kernel: str = ""
    cases: int = 0
    case: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None
    flaky: bool = False
    seen_by: tuple[OracleName, ...] = ()
    alone: bool | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one mutant.

    ``detail`` says why it is equivalent, stillborn or an error. ``cases`` were judged in ``seconds``. ``wrongly`` is
    set on a kill of a mutant that is listed as equivalent.
    """

    status: Status
    seconds: float = 0.0
    cases: int = 0
    kill: Kill | None = None
    detail: str = ""
    wrongly: bool = False
