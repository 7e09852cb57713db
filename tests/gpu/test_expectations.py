"""Expectations of many cases on a GPU: the CPU's, and nobody waits for them.

These tests use CUDA in pytest's own process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.registry import problem_of
from attnfuzz.problems.cases import Case, DenseDecodeCase, MergeStatesCase, PagedAttentionCase, SplitDecodeCase
from attnfuzz.problems.declared_numerics import FixedTolerance
from attnfuzz.problems.recipes import Values
from attnfuzz.problems.variants import Variant
from attnfuzz.trials.expectations import Expectation, expectations, on_device

NORMAL = Values(keys="normal", values="normal", seed=1)
CASES: tuple[Case, ...] = (
    DenseDecodeCase(
        num_q_heads=8, num_kv_heads=2, head_size=128, seq_lens=(700, 0, 33), scale=0.1, values=NORMAL, dtype="bfloat16"
    ),
    MergeStatesCase(num_q_heads=3, head_size=5, num_tokens=7, lse_pairs=(("finite", "-inf"), ("high", "equal"))),
    SplitDecodeCase(
        num_q_heads=3, num_kv_heads=3, head_size=13, seq_lens=(5, 9), scale=8.0, block_size=4, num_splits=3,
        dtype="float32", values=Values(keys="rising", values="large", logit_exponent=8),
    ),
    MergeStatesCase(num_q_heads=1, head_size=256, num_tokens=2, dtype="float32"),
    PagedAttentionCase(
        num_q_heads=6, num_kv_heads=2, head_size=64, seq_lens=(300, 2, 40), query_lens=(3, 0, 40), scale=0.1,
        block_size=24, values=NORMAL, variant=Variant(window=17, alibi="geometric", sinks="level"),
    ),
    DenseDecodeCase(num_q_heads=4, num_kv_heads=2, head_size=16, v_head_size=40, seq_lens=(3, 65), scale=0.25),
)  # fmt: skip


def requests(device: str) -> list[tuple[Declaration, Case, Any]]:
    declarations = [Declaration(name="any", problem=case.problem) for case in CASES]
    return [
        (declaration, case, problem_of(case).values(case, device, declaration.supports))
        for declaration, case in zip(declarations, CASES, strict=True)
    ]


def parts(found: Expectation) -> tuple[torch.Tensor, ...]:
    return found.expected.out, found.expected.lse, found.bound.out, found.bound.lse


def test_a_gpu_expects_what_a_cpu_expects() -> None:
    """A failure on one of them would be none on the other."""
    on_gpu = expectations(requests("cuda"), tolerance="bound", one_copy=False)
    on_cpu = expectations(requests("cpu"), tolerance="bound", one_copy=False)
    for one, other in zip(on_gpu, on_cpu, strict=True):
        assert one.expected.out.is_cuda
        assert one.bound.lse.is_cuda
        for got, wanted in zip(parts(on_device(one, "cpu")), parts(other), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("tolerance", ["bound", FixedTolerance(atol=1e-3, rtol=1e-3)], ids=["bound", "fixed"])
def test_nothing_waits_for_the_gpu(tolerance: Any) -> None:
    """A batch would wait for every run before it, instead of once at its end."""
    given = requests("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        expectations(given, tolerance=tolerance, one_copy=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
