"""Latent decode: rows that are keys and values, splits by turns and by length, and the combination of their states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.kernels.common.device import GpuLimits
from attnfuzz.kernels.grouped.combine_partials import combine_partials_kernel
from attnfuzz.kernels.latent import launch as latent_launch
from attnfuzz.kernels.latent.launch import latent_decode

Make = Callable[..., Any]

HOPPER = GpuLimits(132, 227 << 10, False, True)
AMD = GpuLimits(304, 64 << 10, True, False)


def check(make: Make, lens: Sequence[int], rank: int, options: dict[str, Any], **shape: Any) -> None:
    """Compare with the definition in float64. Weights are rounded to float16 before they multiply the rows."""
    problem = make(lens, **shape)
    q, k_cache, _, table, seq_lens, scale, _, _ = problem.args
    out, lse = latent_decode(q, k_cache[:, :, 0], table, seq_lens, scale, rank, **options)
    for i, keys in enumerate(problem.keys):
        expected = _attend(q[i].double(), keys[:, 0].double(), scale, rank)
        torch.testing.assert_close(out[i].double(), expected[0], rtol=2.0**-9, atol=2.0**-10)
        torch.testing.assert_close(lse[i].double(), expected[1], rtol=2e-6, atol=2e-6)


def _attend(q: Tensor, rows: Tensor, scale: float, rank: int) -> tuple[Tensor, Tensor]:
    scores = q @ rows.T * scale
    return scores.softmax(1) @ rows[:, :rank], scores.logsumexp(1)


@pytest.mark.parametrize("num_splits", [1, 2, 5, 40])
@pytest.mark.by_day("2", "40")
def test_splits_take_tiles_by_turns(num_splits: int, paged_problem: Make) -> None:
    """A tile would be left out or counted twice; splits without one would be combined."""
    options = {"num_splits": num_splits, "tile": 16}
    check(paged_problem, [0, 15, 16, 17, 33, 100], 16, options, heads=(3, 1), head_size=24, block_size=5)


@pytest.mark.parametrize("num_splits", [1, 40])
@pytest.mark.by_day("40")
def test_splits_are_shared_out_by_length(num_splits: int, paged_problem: Make) -> None:
    """One long sequence would be read by one program; tiles would be left out, or a sequence have nobody's result."""
    options = {"num_splits": num_splits, "tile": 16, "balanced": True}
    check(paged_problem, [15, 0, 300, 17, 16, 0, 33], 16, options, heads=(3, 1), head_size=24, block_size=5)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("block_size", [8, 16, 24, 48])
@pytest.mark.by_day("16-3", "24-3", "48-3")
def test_pages_that_hold_whole_tiles_and_others(block_size: int, num_splits: int, paged_problem: Make) -> None:
    """A tile would be read from one page where it lies in two, or from the wrong tokens of its page."""
    options = {"num_splits": num_splits, "tile": 16}
    check(paged_problem, [47, 48, 49, 130], 16, options, heads=(2, 1), head_size=24, block_size=block_size)


def test_columns_of_several_programs_of_the_combination(paged_problem: Make) -> None:
    """Columns beyond the first block of a row would be left as they were, or every block store an LSE."""
    options = {"num_splits": 3, "tile": 16}
    check(paged_problem, [5, 60], 150, options, heads=(2, 1), head_size=160)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_heads_of_several_programs(num_splits: int, paged_problem: Make) -> None:
    """Heads beyond the first block would be left out, or get the states of another one's."""
    options = {"num_splits": num_splits, "tile": 16, "block_m": 16}
    check(paged_problem, [3, 60], 16, options, heads=(35, 1), head_size=16)


def test_as_the_wrapper_plans_it(paged_problem: Make) -> None:
    """What is chosen for a batch could be what cannot be launched."""
    check(paged_problem, [700], 16, {}, heads=(2, 1), head_size=24, block_size=16)
    check(paged_problem, [0, 1, 900], 16, {}, heads=(2, 1), head_size=24, block_size=16)


@pytest.mark.parametrize(
    ("gpu", "num_q_heads", "heads"),
    [(HOPPER, 128, 64), (HOPPER, 40, 64), (HOPPER, 17, 32), (HOPPER, 1, 16), (AMD, 128, 16)],
)
def test_a_program_takes_as_many_heads_as_registers_hold(gpu: GpuLimits, num_q_heads: int, heads: int) -> None:
    """The cache would be read up to eight times; elsewhere than on Hopper registers would not hold the accumulator."""
    assert latent_launch._plan(gpu, num_q_heads).block_m == heads


def test_a_program_combines_several_heads_of_a_sequence() -> None:
    """Heads after a program's first would get its states, or sequences that are whole be overwritten."""
    heads, states, columns = 4, 5, 32
    random = torch.Generator(torch.get_default_device()).manual_seed(3)
    acc = torch.randn(heads, states, columns, generator=random)
    row_max, exp_sum = torch.randn(heads, states, generator=random), torch.rand(heads, states, generator=random) + 1
    shares = torch.tensor([[0, 3], [3, 1], [4, 0]], dtype=torch.int32)
    results = []
    for together in (1, 2, 4):
        out, lse = torch.full((3, heads, columns), 7.0), torch.full((3, heads), 7.0)
        combine_partials_kernel[(3 * heads // together, 1)](
            shares, 1, acc, row_max, exp_sum, shares, out, *out.stride(), lse, *lse.stride(), None, 0, None, 0, states,
            heads, columns, None, TILE=64, BLOCK_DV=columns, CHUNK=2, SHARED_OUT=True, PDL=False, HEADS=together,
        )  # fmt: skip
        results.append((out, lse))
    weights = (row_max[:, :3] - row_max[:, :3].amax(1, keepdim=True)).exp()
    expected = (weights[:, :, None] * acc[:, :3]).sum(1) / (weights * exp_sum[:, :3]).sum(1)[:, None]
    torch.testing.assert_close(results[0][0][0], expected)
    for out, lse in results:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
        assert (out[1:] == 7).all()
