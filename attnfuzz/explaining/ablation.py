"""Which single changes of a failing case make it pass. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from attnfuzz.explaining.changes import changes_of
from attnfuzz.problems.cases import Case
from attnfuzz.problems.supports import OptionValue, Supports

__all__ = ["ablate"]

_SHOWN = 5


def ablate(
    case: Case,
    fails: Callable[[Case], bool | None],
    *,
    supports: Supports,
    options: Mapping[str, tuple[OptionValue, ...]],
    until: float,
) -> tuple[str, ...]:
    """At most two lines: with which changes ``case`` passes, and with which it still ``fails`` in the same way.

    One with which it fails in another way (None) is not told: it says nothing of this bug. Begins no run after
    ``until`` (of ``time.monotonic``).
    """
    outcomes: dict[bool, list[str]] = {True: [], False: []}
    for words, changed in changes_of(case, supports=supports, options=options):
        if time.monotonic() >= until or all(len(found) >= _SHOWN for found in outcomes.values()):
            break
        if (outcome := fails(changed)) is not None:
            outcomes[outcome].append(words)
    lines = []
    if outcomes[False]:
        lines.append(f"passes if changed to: {_listed(outcomes[False])}")
    if outcomes[True]:
        lines.append(f"also fails if changed to: {_listed(outcomes[True])}")
    return tuple(lines)


def _listed(found: list[str]) -> str:
    return "; ".join(found[:_SHOWN])
