"""Ways to look for a smaller value of one field. Torch-free.

A *proposal* is a generator that yields smaller cases and is told after each whether it was accepted (that is, whether
it still fails); it goes on from there and returns the smallest accepted. Driven by refusals only, it yields everything
that it would try on a case that cannot be made smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

import msgspec

__all__ = ["Proposal", "first_of", "lower_integer"]

C = TypeVar("C", bound=msgspec.Struct)
Proposal = Generator[C | None, bool, C]
"""None stands for a change that cannot be made; it counts as refused."""


def first_of(case: C, candidates: Iterable[C | None]) -> Proposal[C]:
    """The first of ``candidates`` that is accepted."""
    for candidate in candidates:
        if (yield candidate) and candidate is not None:
            return candidate
    return case


def lower_integer(
    case: C, value: int, low: int, edit: Callable[[C, int], C | None], *, likely: Iterable[int] = ()
) -> Proposal[C]:
    """The smallest accepted value from ``low``, 0, 1, 2 and ``likely``, then by bisection down to ``low``."""
    refused = low - 1
    for target in sorted({low, 0, 1, 2, *likely}):
        if low <= target < value:
            candidate = edit(case, target)
            if (yield candidate) and candidate is not None:
                case, value = candidate, target
                break
            refused = target
    while value - refused > 1:
        target = (refused + value) // 2
        candidate = edit(case, target)
        if (yield candidate) and candidate is not None:
            case, value = candidate, target
        else:
            refused = target
    return case
