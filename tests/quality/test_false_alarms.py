"""Correct kernels are left in peace: users' kind of kernel here, the bundled ones in `tests/kernels` and campaigns."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.strategies import cases

KERNEL = Path(__file__).parent / "tensor_core_kernels.py"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.by_day("float16")
def test_kernel_with_tensor_cores(dtype: str) -> None:
    """attnfuzz would cry wolf at the first kernel with tl.dot that a user points it at."""
    with Runner() as runner:
        (declaration,) = runner.declarations([f"{KERNEL}:grouped_decode"])
        ratios = []

        @seed(1)
        @settings(
            max_examples=15,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(cases("paged_decode", supports=declaration.supports))
        def check(case: PagedDecodeCase) -> None:
            fields = {name: getattr(case, name) for name in case.__struct_fields__}
            verdict = runner.judge(declaration, PagedDecodeCase(**{**fields, "dtype": dtype}))
            assert verdict.failure is None, verdict.failure
            ratios.append(verdict.error_ratio)

        check()
    assert 0 < max(ratios) < 1
