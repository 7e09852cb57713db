"""Right for as many calls as a checker makes, and wrong, but faster, afterwards."""

# mypy: disable-error-code="import-not-found, no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

from honest_kernels import SUPPORTS, attend

import attnfuzz

_calls = {5: 0, 300: 0}


def _after(calls: int, i: Any):
    _calls[calls] += 1
    out, lse = attend(i)
    if _calls[calls] > calls:
        out *= 1.25
    return out, lse


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def right_five_times(i: Any):
    """As many calls as checkers make of one shape."""
    return _after(5, i)


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def right_300_times(i: Any):
    """As many calls as a checker and its warm-up make."""
    return _after(300, i)
