"""Right for as many calls as a checker makes, and wrong, but faster, afterwards."""

# mypy: disable-error-code="import-not-found, no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

from honest_kernels import SUPPORTS, attend, attend_eagerly

import attnfuzz

_calls = {5: 0, 300: 0, 1500: 0}


def _after(calls: int, i: Any, factor: float = 1.25):
    _calls[calls] += 1
    out, lse = attend(i) if calls < 1500 else attend_eagerly(i)
    if _calls[calls] > calls:
        out *= factor
    return out, lse


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def right_five_times(i: Any):
    """As many calls as checkers make of one shape."""
    return _after(5, i)


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def right_300_times(i: Any):
    """As many calls as a checker and its warm-up make."""
    return _after(300, i)


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def right_1500_times(i: Any):
    """More calls than a checker makes, and then wrong by no more than one in a hundred."""
    return _after(1500, i, 1.01)
