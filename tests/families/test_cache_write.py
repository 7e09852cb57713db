"""`attnfuzz.families.CacheWrite`: planted bugs of its kind are found, and right writers are silent."""

from __future__ import annotations

from typing import Any

import pytest

import attnfuzz
from attnfuzz.explaining.explain import explain_case
from attnfuzz.families import cache_write_kernels as bundled
from tests.families import cache_write_kernels as kernels
from tests.families.searched import found_of

SAYS = {
    "padding": ("", "_cache"),
    "v_counted": ("accuracy", "v_cache"),
    "k_twice": ("accuracy", "v_cache"),
    "packed": ("", "k_"),
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
    "by_slot": ("accuracy", "k_"),
    "pairs": ("accuracy", "k_"),
    "backwards": ("accuracy", "k_"),
    "sines_first": ("accuracy", "k_"),
    "v_too": ("accuracy", "v_"),
    "global_of_k": ("accuracy", "v_"),
    "by_global": ("accuracy", "_"),
    "blocks_of_32": ("accuracy", "_"),
    "one_scale": ("accuracy", "_"),
    "unrounded": ("accuracy", "_cache"),
    "unsigned": ("accuracy", "_cache"),
    "swizzled": ("", "v_scales"),
    "mixture": ("one_token_is_kept", "mixture"),
    "other_scale": ("one_token_is_kept", "mixture"),
}


TELLS = {
    "padding": "a token whose slot is -1 is written into the last slot of the cache",
    "v_counted": "tokens of V are counted without those whose slot is -1",
    "by_slot": "K is rotated by its slot, not by its position",
    "pairs": "K is rotated in pairs of neighbours, not of halves",
    "backwards": "K is rotated backwards",
    "sines_first": "sines and cosines are exchanged",
    "v_too": "",
}


def test_new_tokens_that_are_taken_for_contiguous_are_told() -> None:
    """A reader would be given an element and two numbers, though the reference gives these of other strides."""
    kernel: Any = kernels.packed  # type: ignore[attr-defined]
    case = kernel.declaration.problem.case_type(num_tokens=3, strides="outer_gap", seed=2)
    causes = explain_case(kernel, case, device="cpu", seconds=600.0).causes or ()
    assert [cause.words for cause in causes] == ["key and value are read as if contiguous"]


@pytest.mark.parametrize("bug", TELLS)
@pytest.mark.by_day("padding", "v_counted", "by_slot", "pairs")
def test_a_mistake_that_the_problem_knows_is_told_by_its_name(bug: str) -> None:
    """A reader would be given an element and two numbers, or a mistake that the kernel does not make."""
    kernel = getattr(kernels, bug)
    case = kernel.declaration.problem.case_type(
        num_tokens=2, skipped=int(bug in ("padding", "v_counted")), block_size=5, seed=2
    )
    causes = explain_case(kernel, case, device="cpu", seconds=600.0).causes or ()
    told = [cause.words for cause in causes if cause.mistake == "mistaken"]
    assert told == [TELLS[bug]] * bool(TELLS[bug])


def test_the_scale_of_k_in_place_of_that_of_v_is_told() -> None:
    """Each number of 8 bits is off by its last bit, so that what the reference gives seemed to be another result."""
    name = "k_scale"
    kernel = getattr(kernels, name)
    case = kernel.declaration.problem.case_type(num_tokens=2, cache="fp8", block_size=5, seed=1)
    causes = explain_case(kernel, case, device="cpu", seconds=600.0).causes or ()
    assert [cause.words for cause in causes] == ["k_scale is read in place of v_scale"]


def test_each_planted_bug_is_expected() -> None:
    """One would be planted and never looked for."""
    assert SAYS.keys() == kernels.PLANTED.keys()


@pytest.mark.parametrize("bug", SAYS)
@pytest.mark.by_day("padding", "k_scale", "packed", "token", "high_first")
def test_planted_bugs_are_found_and_shrunk(bug: str) -> None:
    """A writer that puts tokens elsewhere, or other numbers, would pass."""
    failures = found_of(getattr(kernels, bug), max_examples=120)
    oracle, message = SAYS[bug]
    for one in failures:
        assert one.failure.oracle == oracle or not oracle
        assert message in one.failure.message
    cases: list[Any] = [one.case for one in failures]
    assert min(case.num_tokens for case in cases) <= (6 if bug == "page_size" else 4)  # a second page of 5
    # Of stray bytes of two tensors the more are told; where a byte of one is what was there, that is the other one.
    of_blocks = dict.fromkeys(
        ("blocks_of_32", "one_scale", "swizzled", "global_of_k"), 64
    )  # more than one of 16 numbers
    largest = {"tile": 80, "zero_cut": 64, "symmetric": 128, "page_size": 64, **of_blocks}.get(bug, 16)
    assert all(case.head_size <= largest for case in cases)


@pytest.mark.parametrize("kernel", [kernels.right, bundled.cache_write_eager, bundled.cache_write])
@pytest.mark.by_day("cache_write_eager")
def test_right_writers_are_silent(kernel: Any) -> None:
    """A format's rounding would be called a bug."""
    attnfuzz.fuzz(kernel, max_examples=60 if kernel is not bundled.cache_write else 12, device="cpu")(lambda: None)()
