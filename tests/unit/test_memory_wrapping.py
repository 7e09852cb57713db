"""Where short offsets land."""

from __future__ import annotations

import pytest

from attnfuzz.memory.wrapping import landings, wrapped


@pytest.mark.parametrize(
    ("start", "length", "bits", "signed", "pieces"),
    [
        (5, 3, 16, False, [(5, 3)]),
        (65_536, 3, 16, False, [(0, 3)]),
        (65_534, 4, 16, False, [(65_534, 2), (0, 2)]),
        (32_767, 2, 16, True, [(32_767, 1), (-32_768, 1)]),
        ((1 << 31) + 7, 4, 32, True, [(-(1 << 31) + 7, 4)]),
        ((1 << 32) + 7, 4, 32, True, [(7, 4)]),
    ],
)
def test_a_range_wraps_as_integers_of_so_many_bits_do(
    start: int, length: int, bits: int, signed: bool, pieces: list[tuple[int, int]]
) -> None:
    """Decoys would lie where nobody looks, and a wrapped offset would read zeros."""
    assert list(wrapped(start, length, bits, signed=signed)) == pieces


def test_landings_of_elements_and_bytes() -> None:
    """An overflow in bytes, as of a buffer descriptor, comes out elsewhere than one in elements."""
    assert landings(100, 8, 2) == set()
    assert landings((1 << 30) + 100, 8, 2) == {(-(1 << 30) + 100, 8)}  # signed bytes
    just_past = (1 << 31) + 100
    assert landings(just_past, 8, 2) == {(-(1 << 31) + 100, 8), (100, 8)}  # signed elements; bytes of either sign
    assert landings((1 << 32) + 100, 8, 4) == {(100, 8)}
