"""`attnfuzz.families.CacheWrite`: planted bugs of its kind are found, and right writers are silent."""

from __future__ import annotations

from typing import Any

import pytest

import attnfuzz
from attnfuzz.families import cache_write_kernels as bundled
from tests.families import cache_write_kernels as kernels

SAYS = {
    "padding": ("", "_cache"),
    "k_twice": ("accuracy", "v_cache"),
    "packed": ("", "_cache"),
    "page_size": ("", "_cache"),
    "k_scale": ("accuracy", "v_cache"),
    "multiplied": ("accuracy", "_cache"),
    "token": ("accuracy", "_cache"),
    "cut": ("accuracy", "_cache"),
    "zeros": ("", "_cache"),
    "high_first": ("accuracy", "_cache"),
    "sixteenths": ("accuracy", "_"),
    "symmetric": ("accuracy", "_cache"),
    "zero_cut": ("accuracy", "_"),
    "no_signs": ("accuracy", "_"),
    "one_sided": ("accuracy", "_"),
    "tile": ("unwritten", "was never written"),
}


def test_each_planted_bug_is_expected() -> None:
    """One would be planted and never looked for."""
    assert SAYS.keys() == kernels.PLANTED.keys()


@pytest.mark.parametrize("bug", SAYS)
@pytest.mark.by_day("padding", "k_scale", "packed", "token", "high_first")
def test_planted_bugs_are_found_and_shrunk(bug: str) -> None:
    """A writer that puts tokens elsewhere, or other numbers, would pass."""

    @attnfuzz.fuzz(getattr(kernels, bug), max_examples=120, device="cpu")
    def search() -> None:
        pass

    with pytest.raises((attnfuzz.KernelFailure, ExceptionGroup)) as caught:  # a group of those that show it twice
        search()
    raised = caught.value
    failures = raised.exceptions if isinstance(raised, ExceptionGroup) else (raised,)
    oracle, message = SAYS[bug]
    for one in failures:
        assert isinstance(one, attnfuzz.KernelFailure)
        assert one.failure.oracle == oracle or not oracle
        assert message in one.failure.message
    cases: list[Any] = [one.case for one in failures if isinstance(one, attnfuzz.KernelFailure)]
    assert min(case.num_tokens for case in cases) <= (6 if bug == "page_size" else 4)  # a second page of 5
    # Of stray bytes of two tensors the more are told; where a byte of one is what was there, that is the other one.
    largest = {"tile": 80, "zero_cut": 64, "page_size": 64}.get(bug, 16)
    assert all(case.head_size <= largest for case in cases)


@pytest.mark.parametrize("kernel", [kernels.right, bundled.cache_write_eager, bundled.cache_write])
@pytest.mark.by_day("cache_write_eager")
def test_right_writers_are_silent(kernel: Any) -> None:
    """A format's rounding would be called a bug."""
    attnfuzz.fuzz(kernel, max_examples=60 if kernel is not bundled.cache_write else 12, device="cpu")(lambda: None)()
