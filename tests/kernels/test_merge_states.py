"""Merging two attention states, Triton and eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.kernels import eager, launch

Make = Callable[..., Any]
INF = math.inf
LSES = [0.0, 3.0, -40.0, -INF, INF]
"""Every pair of these is one token."""

both = pytest.mark.parametrize("kernels", [launch, eager], ids=["triton", "eager"])
layouts = pytest.mark.parametrize("lse_layout", ["HT", "TH"])


def states(lse_layout: str, head_size: int = 8, dtype: torch.dtype = torch.float16) -> tuple[Tensor, ...]:
    """``prefix_output, prefix_lse, suffix_output, suffix_lse`` of 25 tokens and 2 heads; NaN where a side is empty."""
    pairs = torch.cartesian_prod(torch.tensor(LSES), torch.tensor(LSES))
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    sides: list[Tensor] = []
    for side in (0, 1):
        lse = pairs[:, side, None] + torch.tensor([0.0, 0.5])
        out = torch.randn(*lse.shape, head_size, generator=generator).to(dtype)
        out[lse.isinf()] = math.nan
        sides += [out, lse.t().contiguous() if lse_layout == "HT" else lse]
    return tuple(sides)


def expected(inputs: tuple[Tensor, ...], lse_layout: str, merge: Make) -> Any:
    prefix, prefix_lse, suffix, suffix_lse = inputs
    if lse_layout == "HT":
        prefix_lse, suffix_lse = prefix_lse.t(), suffix_lse.t()
    return merge([(prefix, prefix_lse), (suffix, suffix_lse)])


@both
@layouts
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_pair_of_lses(kernels: ModuleType, lse_layout: str, dtype: torch.dtype, merge: Make, check: Make) -> None:
    """Sides that are empty (-inf or +inf), equal or far apart would give NaN, leak a NaN, or be weighed wrongly."""
    inputs = states(lse_layout, dtype=dtype)
    output, lse = kernels.merge_states(*inputs, lse_layout=lse_layout)
    assert lse.shape == inputs[1].shape
    check((output, lse.t() if lse_layout == "HT" else lse), expected(inputs, lse_layout, merge))


@both
def test_an_empty_side_changes_nothing(kernels: ModuleType) -> None:
    """Merging with nothing would round the other side."""
    prefix, prefix_lse, suffix, _ = states("TH")
    live = prefix_lse.isfinite()
    output, lse = kernels.merge_states(prefix, prefix_lse, suffix, torch.full_like(prefix_lse, -INF), lse_layout="TH")
    assert torch.equal(output[live], prefix[live])
    assert torch.equal(lse[live], prefix_lse[live])


@both
def test_two_empty_sides_are_empty(kernels: ModuleType) -> None:
    """A token that attends to nothing would come out as NaN and poison the layers above."""
    nothing = torch.full((3, 2, 8), math.nan, dtype=torch.float16)
    output, lse = kernels.merge_states(nothing, torch.full((2, 3), -INF), nothing, torch.full((2, 3), INF))
    assert torch.equal(output, torch.zeros_like(output))
    assert torch.equal(lse, torch.full((2, 3), -INF))


@both
@layouts
@pytest.mark.parametrize("head_size", [1, 13])
def test_every_stride_is_honoured(
    kernels: ModuleType, lse_layout: str, head_size: int, merge: Make, check: Make, spread: Make
) -> None:
    """Views would be read, or results written, as if they were contiguous, or padding columns touched."""
    inputs = tuple(spread(t) for t in states(lse_layout, head_size))
    output, lse = spread(torch.zeros_like(inputs[0])), spread(torch.zeros_like(inputs[1]))
    kernels.merge_states(*inputs, lse_layout=lse_layout, output=output, output_lse=lse)
    check((output, lse.t() if lse_layout == "HT" else lse), expected(inputs, lse_layout, merge))
    assert output._base is not None
    assert int(output._base.isfinite().sum()) == output.numel()


@both
def test_result_may_replace_an_input(kernels: ModuleType, merge: Make, check: Make) -> None:
    """Merging in place, as engines do to save memory, would read what it has already overwritten."""
    inputs = states("HT")
    answer = expected(tuple(t.clone() for t in inputs), "HT", merge)
    output, lse = kernels.merge_states(*inputs, output=inputs[0], output_lse=inputs[3])
    check((output, lse.t()), answer)
