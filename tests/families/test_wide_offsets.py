"""Entries that lists of a user's problem name are tried past 2^31 elements: narrow offsets are told, others are not."""

from __future__ import annotations

import pytest

import attnfuzz
from tests.families import wide_kernels as kernels


@pytest.mark.parametrize("name", ["write", "attend"])
@pytest.mark.by_day("write")
def test_offsets_of_32_bits_are_found_in_larger_tensors(name: str) -> None:
    """What wraps would be seen by whoever serves with a cache of gigabytes first."""

    @attnfuzz.fuzz(getattr(kernels, f"{name}_narrow"), max_examples=200, device="cpu")
    def search() -> None:
        pass

    with pytest.raises(attnfuzz.KernelFailure) as caught:
        search()
    failure = caught.value.failure
    assert (failure.oracle, failure.cause) == ("page_relocation", "narrow_offsets")
    assert {"write": "slot_mapping", "attend": "indices"}[name] in failure.message


@pytest.mark.parametrize("name", ["write", "attend"])
@pytest.mark.by_day("write")
def test_right_kernels_are_silent_however_large_the_tensors_are(name: str) -> None:
    """Memory far away, or what names it, would be wrong itself."""
    attnfuzz.fuzz(getattr(kernels, f"{name}_wide"), max_examples=30, device="cpu")(lambda: None)()


def test_offsets_in_float_are_wrong_below_the_limit_of_32_bits_too() -> None:
    """Whoever has 64 bits already would be told to widen offsets; on a GPU nothing else tells the two apart."""

    @attnfuzz.fuzz(kernels.attend_in_float, max_examples=200, device="cpu")
    def search() -> None:
        pass

    with pytest.raises(attnfuzz.KernelFailure) as caught:
        search()
    failure = caught.value.failure
    assert (failure.oracle, failure.cause) == ("page_relocation", "")
    assert any("wrong with all of them below 2^31 bytes" in line for line in failure.details)
