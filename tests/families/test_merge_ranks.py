"""`attnfuzz.families.MergeRanks`: planted bugs of its kind are found, and right kernels are silent."""

from __future__ import annotations

from typing import Any

import pytest

import attnfuzz
from attnfuzz.families import merge_ranks_kernels as bundled
from tests.families import merge_ranks_kernels as kernels
from tests.families.searched import smallest_cases


@pytest.mark.parametrize("bug", kernels.PLANTED)
@pytest.mark.by_day("both_empty", "believes", "base")
def test_planted_bugs_are_found_and_shrunk(bug: str) -> None:
    """A merge that weighs ranks wrongly, or takes what an empty one holds, would pass."""
    for case in smallest_cases(getattr(kernels, bug)):
        assert sum(case.seq_lens) <= 20
        assert (case.head_size, case.padded) == (16, 0)
        assert case.num_ranks <= (3 if bug == "two_ranks" else 2)


@pytest.mark.parametrize("kernel", [kernels.right, bundled.merge_ranks_eager, bundled.merge_ranks])
@pytest.mark.by_day("merge_ranks_eager")
def test_right_kernels_are_silent(kernel: Any) -> None:
    """Empty ranks, padded rows, or what float32 makes of distant log-sum-exps would be called bugs."""
    attnfuzz.fuzz(kernel, max_examples=100 if kernel is kernels.right else 30, device="cpu")(lambda: None)()
