"""Merging any number of attention states at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.inputs.reference import merge_all
from attnfuzz.kernels.merge.launch import merge_many

Make = Callable[..., Any]

layouts = pytest.mark.parametrize("lse_layout", ["HT", "TH"])


def many_states(
    num_states: int, lse_layout: str, dtype: torch.dtype = torch.float16, head_size: int = 8
) -> tuple[Tensor, Tensor]:
    """Of 7 tokens and 3 heads, half of them empty, with NaN for an output; the first token has no keys at all."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(7)
    lses = 20 * torch.randn(num_states, 7, 3, generator=generator)
    lses[torch.rand(lses.shape, generator=generator) < 0.25] = math.inf
    lses[torch.rand(lses.shape, generator=generator) < 0.25] = -math.inf
    lses[:, 0] = -math.inf
    outputs = torch.randn(*lses.shape, head_size, generator=generator).to(dtype)
    outputs[lses.isinf()] = math.nan
    return outputs, lses.mT.contiguous() if lse_layout == "HT" else lses


def check_merged(got: tuple[Tensor, Tensor], inputs: tuple[Tensor, Tensor], lse_layout: str, check: Make) -> None:
    """Against the harness' float64 reference for any number of states."""
    (output, lse), (outputs, lses) = got, inputs
    if lse_layout == "HT":
        lse, lses = lse.mT, lses.mT
    states = lses.double().masked_fill(lses == math.inf, -math.inf).movedim(0, -1)
    check((output, lse), merge_all(outputs.double().nan_to_num().movedim(0, -2), states))


@layouts
@pytest.mark.parametrize("num_states", [1, 2, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_number_of_states(num_states: int, lse_layout: str, dtype: torch.dtype, check: Make) -> None:
    """A state would be left out, counted twice or weighed wrongly, or an empty one's NaN would leak."""
    inputs = many_states(num_states, lse_layout, dtype)
    check_merged(merge_many(*inputs, lse_layout=lse_layout), inputs, lse_layout, check)


@pytest.mark.parametrize(("block_elements", "block_tokens"), [(8, 1), (32, 4), (64, 2), (1024, 8)])
def test_blocks_cover_every_row_once(block_elements: int, block_tokens: int, check: Make) -> None:
    """Rows at the end of a block, of the tokens or of the heads would be left out, or taken from another row."""
    inputs = many_states(3, "TH")
    options: dict[str, Any] = {"block_elements": block_elements, "block_tokens": block_tokens}
    check_merged(merge_many(*inputs, lse_layout="TH", **options), inputs, "TH", check)


def test_no_states_at_all_are_empty() -> None:
    """An engine with nothing to merge for a batch would get whatever was in the buffer."""
    output, lse = merge_many(torch.zeros(0, 2, 3, 8), torch.zeros(0, 3, 2))
    assert torch.equal(output, torch.zeros(2, 3, 8))
    assert torch.equal(lse, torch.full((3, 2), -math.inf))


def test_lses_in_the_other_layout_are_refused() -> None:
    """They would be read as if transposed."""
    with pytest.raises(
        ValueError, match=r"lses.shape=\[4, 2, 3\] must be \[num_states, num_q_heads, num_tokens\] with"
    ):
        merge_many(torch.zeros(4, 2, 3, 8), torch.zeros(4, 2, 3))
