"""What the weights of one row say of the case's variants: tokens outside the window, a cap, bias or sink left out."""

from __future__ import annotations

from attnfuzz.explaining.row import MeasuredRow, Reading
from attnfuzz.explaining.words import weight
from attnfuzz.oracles.diagnosis import explain_row
from attnfuzz.problems.variants import PLAIN_VARIANT

__all__ = ["diagnosed", "read_variant"]


def read_variant(row: MeasuredRow) -> Reading | None:
    """A mistake in what the case asks for beyond plain attention; None if the weights point to none."""
    if row.case.variant == PLAIN_VARIANT:
        return None
    mistake = diagnosed(row)
    named = () if mistake is None else (mistake,)
    if outside := _outside_the_window(row):
        lies, has = ("lies", "has") if len(outside) == 1 else ("lie", "have")
        total = weight(row.got[row.own[outside]].sum())
        text = f"{row.tokens(outside)} {lies} outside the window of {row.case.variant.window} and {has} weight {total}"
        return Reading("; ".join((f"{text}, expected 0", *named)), (*named, "tokens outside the window are read"))
    return None if mistake is None else Reading(mistake, named)


def diagnosed(row: MeasuredRow) -> str | None:
    """What mistake, of those that `attnfuzz.oracles.diagnosis` replays, gives all of these weights."""
    full = row.diagnosable()
    found = None if full is None else explain_row(full)
    return None if found is None else found.words or None


def _outside_the_window(row: MeasuredRow) -> list[int]:
    """Positions before the window that have weight, unless others' places have some as well: then pages are wrong."""
    is_own = row.got.new_zeros(len(row.got)).index_fill_(0, row.own, 1.0) > 0
    if bool(((row.got > row.bound) & ~is_own).any()):
        return []
    before = row.own[: row.first_seen]
    found: list[int] = (row.got[before] > row.bound[before]).nonzero()[:, 0].tolist()
    return found
