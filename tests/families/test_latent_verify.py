"""`attnfuzz.families.LatentVerify`: planted bugs of its kind are found, and right kernels are silent."""

from __future__ import annotations

from typing import Any

import pytest

import attnfuzz
from attnfuzz.families import latent_verify_kernels as bundled
from tests.families import latent_verify_kernels as kernels
from tests.families.searched import smallest_cases


@pytest.mark.parametrize("bug", kernels.PLANTED)
@pytest.mark.by_day("sees_later", "one_scale", "uniform")
def test_planted_bugs_are_found_and_shrunk(bug: str) -> None:
    """A kernel that masks new tokens wrongly, or misreads a latent vector of 8 bits, would pass."""
    for case in smallest_cases(getattr(kernels, bug)):
        assert case.num_heads == 1
        assert sum(case.contexts) <= (64 if bug == "whole_tiles" else 20)
        assert case.rank <= (256 if bug == "one_scale" else 16)


@pytest.mark.parametrize("kernel", [kernels.right, bundled.latent_verify_eager, bundled.latent_verify])
@pytest.mark.by_day("latent_verify_eager")
def test_right_kernels_are_silent(kernel: Any) -> None:
    """New tokens, ragged batches or what 8 bits hold would be called bugs of whoever reads them rightly."""
    attnfuzz.fuzz(kernel, max_examples=60 if kernel is kernels.right else 20, device="cpu")(lambda: None)()
