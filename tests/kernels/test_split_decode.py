"""The two stages of split-K decode by themselves, Triton and eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from attnfuzz.kernels import eager
from attnfuzz.kernels.paged import launch as launch_paged

Make = Callable[..., Any]

both = pytest.mark.parametrize("kernels", [launch_paged, eager], ids=["triton", "eager"])


@both
@pytest.mark.parametrize("num_splits", [1, 3, 4])
def test_partials_merge_to_the_whole(
    kernels: ModuleType, num_splits: int, paged_problem: Make, check: Make, merge: Make
) -> None:
    """Splits would overlap, leave a gap, or hold sums that are not normalised."""
    problem = paged_problem([0, 1, 5, 9], dtype=torch.float32)
    partial_out, partial_lse = kernels.split_decode(*problem.args, num_splits)
    assert partial_out.shape == (4, 2, num_splits, 8)
    out, lse = merge([(partial_out[:, :, s], partial_lse[:, :, s]) for s in range(num_splits)])
    check((out.float(), lse), problem.expected)


@both
def test_split_boundaries_follow_the_length(kernels: ModuleType, paged_problem: Make) -> None:
    """5 tokens in 4 splits are 2 + 2 + 1 + 0; another cut would leave work unbalanced or the last split too long."""
    problem = paged_problem([5], heads=(1, 1), dtype=torch.float32)
    _, lse = kernels.split_decode(*problem.args, 4)
    scores = (problem.q[0, 0] * problem.keys[0][:, 0]).sum(-1) * problem.args[5]
    expected = torch.stack([scores[:2].logsumexp(0), scores[2:4].logsumexp(0), scores[4], torch.tensor(-math.inf)])
    torch.testing.assert_close(lse[0, 0], expected)


@both
def test_empty_splits_are_written(kernels: ModuleType, paged_problem: Make) -> None:
    """A slot without tokens would keep what was in the buffer, and the reduction would believe it."""
    problem = paged_problem([0, 1], heads=(1, 1))
    partial_out = torch.full((2, 1, 3, 8), math.nan, dtype=torch.float16)
    partial_lse = torch.full((2, 1, 3), math.nan)
    kernels.split_decode(*problem.args, 3, partial_out=partial_out, partial_lse=partial_lse)
    empty = torch.tensor([[[True, True, True]], [[False, True, True]]])
    assert torch.equal(partial_lse == -math.inf, empty)
    assert not partial_out[empty].any()
    assert partial_out.isfinite().all()


@both
def test_every_stride_of_the_partials_is_honoured(
    kernels: ModuleType, paged_problem: Make, spread: Make, check: Make
) -> None:
    """Partials that are views would be written or read as if they were contiguous."""
    problem = paged_problem([1, 6], heads=(4, 2)).spread()
    partial_out, partial_lse = spread(torch.zeros(2, 4, 2, 8)), spread(torch.zeros(2, 4, 2))
    kernels.split_decode(*problem.args, 2, partial_out=partial_out, partial_lse=partial_lse)
    out, lse = spread(torch.zeros(2, 4, 8)), spread(torch.zeros(2, 4))
    kernels.reduce_splits(partial_out, partial_lse, out=out, lse=lse)
    check((out.to(torch.float16), lse), problem.expected)
    for result in (partial_out, out, lse):
        assert result._base is not None
        assert int(result._base.isfinite().sum()) == result.numel()


@both
@pytest.mark.parametrize("num_splits", [1, 16, 20])
def test_reduction_of_far_apart_states(kernels: ModuleType, num_splits: int) -> None:
    """A large LSE would overflow or scale the output; an empty split would spoil its row or a NaN in it leak."""
    lse = torch.linspace(9e3, 1e4, num_splits).repeat(2, 1)[:, None]
    out = torch.arange(2.0 * num_splits * 4).reshape(2, 1, num_splits, 4)
    lse[0, 0, 0], out[0, 0, 0] = -math.inf, math.nan
    merged, merged_lse = kernels.reduce_splits(out, lse)
    weights = lse.double().softmax(-1).nan_to_num()
    expected = (weights[..., None] * out.double().nan_to_num()).sum(2)
    torch.testing.assert_close(merged.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(merged_lse, lse.logsumexp(-1))
