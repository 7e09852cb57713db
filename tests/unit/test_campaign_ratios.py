"""attnfuzz.campaign.counts: the bound is an edge between two bins, and nothing falls beside them."""

from __future__ import annotations

import math

import pytest

from attnfuzz.campaign.counts import EXACT, LEAST, MOST, NOT_FINITE, above, ratio_bin


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.0, EXACT),
        (1e-300, LEAST),
        (0.5, -2),
        (0.5001, -1),
        (1.0, 0),
        (math.nextafter(1.0, 2), 1),
        (1e300, MOST),
        (math.inf, NOT_FINITE),
        (math.nan, NOT_FINITE),
    ],
)
def test_ratios_fall_into_their_bins(ratio: float, expected: int) -> None:
    """A case exactly at its bound has passed, and would be drawn among the failures."""
    assert ratio_bin(ratio) == expected


def test_edges_belong_to_the_bin_below() -> None:
    """What is drawn beyond the edge of the bound would be less than it."""
    for number in range(LEAST, MOST):
        assert ratio_bin(above(number) * (1 - 1e-9)) == number
        assert ratio_bin(above(number) * (1 + 1e-9)) == number + 1
