"""Paged decode in one pass and in two (split-K with its reduction), Triton and eager."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from attnfuzz.kernels import eager
from attnfuzz.kernels.paged import launch as launch_paged
from attnfuzz.kernels.paged.paged_simple import paged_simple

Make = Callable[..., Any]
LAYOUTS = ["NHD", "HND", "packed", "interleaved"]
KERNELS = {
    "naive": partial(launch_paged.paged_decode, tile=4),
    "split_k": partial(launch_paged.split_paged_decode, num_splits=3, tile=4),
    "eager": eager.paged_decode,
    "eager_split_k": partial(eager.split_paged_decode, num_splits=3),
}

every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


@pytest.mark.by_day
@every_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [3, 4])
def test_lengths_around_a_page(kernel: Make, layout: str, block_size: int, paged_problem: Make, check: Make) -> None:
    """A token at the edge of a page or tile would be dropped or doubled, or a dead one read, in some layout."""
    problem = paged_problem([0, 1, block_size - 1, 2 * block_size + 1], block_size=block_size, layout=layout)
    check(kernel(*problem.args), problem.expected)


@every_kernel
def test_a_page_that_two_sequences_share(kernel: Make, paged_problem: Make) -> None:
    """Pages would be taken from their position rather than from the block table."""
    q, k_cache, v_cache, table, *rest = paged_problem([4, 4]).args
    table[1, 0] = table[0, 0]
    out, lse = kernel(q[[0, 0]], k_cache, v_cache, table, *rest)
    assert torch.equal(out[0], out[1])
    assert torch.equal(lse[0], lse[1])


@pytest.mark.parametrize("tile", [1, 2, 16])
def test_tile_size_is_free(tile: int, paged_problem: Make, check: Make) -> None:
    """A tile smaller or larger than a page, or than the sequence, would miss tokens."""
    problem = paged_problem([7], block_size=5)
    check(launch_paged.paged_decode(*problem.args, tile=tile), problem.expected)


@every_kernel
def test_integer_dtypes_and_scalars(kernel: Make, paged_problem: Make, check: Make) -> None:
    """int64 lengths and tables, which some engines keep, would be read as pairs of int32."""
    problem = paged_problem([2, 6])
    q, k_cache, v_cache, table, seq_lens, *rest = problem.args
    check(kernel(q, k_cache, v_cache, table.long(), seq_lens.long(), *rest), problem.expected)


@every_kernel
def test_pages_beyond_two_to_the_31_elements(kernel: Make, paged_problem: Make, check: Make) -> None:
    """An address would wrap at 32 bits and read from outside the cache."""
    problem = paged_problem([5], block_size=4, heads=(1, 1), layout="interleaved")
    q, k_cache, v_cache, table, *rest = problem.args
    num_blocks = 2**31 // (2 * 4 * 8) + 4
    # 4 GiB of address space, of which only the pages in use are ever touched.
    far = torch.empty(num_blocks, 2, 4, 1, 8, dtype=torch.float16)
    shift = num_blocks - len(k_cache)
    far[shift:, 0], far[shift:, 1] = k_cache, v_cache
    table[0, :2] += shift
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check(kernel(q, far[:, 0], far[:, 1], table, *rest), problem.expected)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "KiB: the whole buffer was touched"


@pytest.mark.parametrize("kernel", [KERNELS["split_k"], KERNELS["eager_split_k"]], ids=["triton", "eager"])
@pytest.mark.parametrize("num_splits", [1, 2, 17])
def test_any_number_of_splits(kernel: Make, num_splits: int, paged_problem: Make, check: Make) -> None:
    """The reduction would lose splits beyond its step, or weigh empty ones."""
    problem = paged_problem([0, 1, 9], heads=(1, 1))
    check(kernel(*problem.args, num_splits=num_splits), problem.expected)


@pytest.mark.parametrize("kernel", [KERNELS["split_k"], KERNELS["eager_split_k"]], ids=["triton", "eager"])
def test_partials_in_the_input_dtype(kernel: Make, paged_problem: Make) -> None:
    """The option would have no effect, or cost more than one more rounding of each partial."""
    problem = paged_problem([9], heads=(1, 1), head_size=64, dtype=torch.bfloat16)
    exact, _ = problem.expected
    out, _ = kernel(*problem.args, partial_dtype="input")
    better, _ = kernel(*problem.args, partial_dtype="float32")
    assert not torch.equal(out, better)
    bound = 2 * 2.0**-8 * problem.values[0].abs().amax().item()
    assert (out.double() - exact).abs().max().item() < bound
    assert math.isfinite(bound)


def test_the_simple_kernel_refuses_what_it_cannot_read(paged_problem: Callable[..., Any]) -> None:
    """It knows no strides, and would read other elements than those that are meant."""
    problem = paged_problem([5, 3])
    with pytest.raises(ValueError, match=r"q of strides \(128, 32, 2\) must be contiguous; use paged_decode"):
        paged_simple(*problem.spread().args[:6])


@pytest.mark.parametrize("lens", [[0, 1, 70], [33]])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_simple_kernel(
    lens: list[int], block_size: int, paged_problem: Callable[..., Any], check: Callable[..., None]
) -> None:
    """The kernel that others are explained by would be wrong itself."""
    problem = paged_problem(lens, block_size=block_size, heads=(6, 2), head_size=24)
    check(paged_simple(*problem.args[:6]), problem.expected)


def test_a_table_without_columns(paged_problem: Callable[..., Any], check: Callable[..., None]) -> None:
    """A batch of empty sequences whose table has no entry would raise instead of being empty."""
    q, k, v, table, lens, *rest = paged_problem([0, 0]).args
    for kernels in (launch_paged, eager):
        for splits in ((), (2,)):
            decode = kernels.split_paged_decode if splits else kernels.paged_decode
            check(decode(q, k, v, table[:, :0], lens, *rest, *splits), paged_problem([0, 0]).expected)
