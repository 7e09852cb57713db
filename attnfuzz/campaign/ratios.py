"""A histogram of error over bound: bins of half a power of two, so that 1, the bound itself, is an edge."""

from __future__ import annotations

import math

__all__ = ["EXACT", "LEAST", "MOST", "NOT_FINITE", "above", "ratio_bin"]

LEAST, MOST = -28, 8
"""The first and last bin: up to 2**-14, and everything above 2**3.5."""
EXACT = LEAST - 1
"""The bin of cases without any error."""
NOT_FINITE = MOST + 1
"""The bin of wrong NaNs and infinities."""


def ratio_bin(ratio: float) -> int:
    """The bin of ``ratio`` >= 0: bin ``n`` holds what is above ``2**((n - 1) / 2)`` and at most ``2**(n / 2)``."""
    if not math.isfinite(ratio):
        return NOT_FINITE
    return EXACT if ratio <= 0 else min(MOST, max(LEAST, math.ceil(2 * math.log2(ratio))))


def above(number: int) -> float:
    """The upper edge of bin ``number``; a case whose bin ends above 1 has failed."""
    return math.pow(2.0, number / 2)
