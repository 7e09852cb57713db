"""`attnfuzz.families.SparseDecode`: planted bugs of its kind are found, and a right kernel is silent."""

from __future__ import annotations

from typing import Any

import pytest

import attnfuzz
from attnfuzz.families import sparse_decode_kernels as bundled
from tests.families import sparse_decode_kernels as kernels
from tests.families.searched import smallest_cases


@pytest.mark.parametrize("bug", kernels.PLANTED)
@pytest.mark.by_day("minus_one", "once", "nan_times_zero")
def test_planted_bugs_are_found_and_shrunk(bug: str) -> None:
    """A kernel that reads what no list names, or leaves out what one does, would pass."""
    for case in smallest_cases(getattr(kernels, bug)):
        assert (case.num_heads, case.dtype) == (1, "bfloat16")
        assert sum(case.named) <= 8
        assert len(case.named) <= 2


@pytest.mark.parametrize("kernel", [kernels.right, bundled.sparse_decode_eager, bundled.sparse_decode])
@pytest.mark.by_day("sparse_decode_eager")
def test_right_kernels_are_silent(kernel: Any) -> None:
    """Sentinels, repeats and slots that no list names would be called bugs of whoever reads them rightly."""
    attnfuzz.fuzz(kernel, max_examples=60 if kernel is kernels.right else 20, device="cpu")(lambda: None)()
