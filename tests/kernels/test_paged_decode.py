"""Decode attention on pages, on dense tensors and in splits."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from attnfuzz.kernels import eager
from attnfuzz.kernels.dense import launch
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


DTYPES = [torch.float16, torch.bfloat16, torch.float32]

both = pytest.mark.parametrize("kernels", [launch, eager], ids=["triton", "eager"])


@pytest.mark.by_day
@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_around_a_tile(kernels: ModuleType, dtype: torch.dtype, dense_problem: Make, check: Make) -> None:
    """The last token of a tile, or the first of the next, would be dropped, doubled or read from dead memory."""
    problem = dense_problem([0, 1, 15, 16, 17, 33], dtype=dtype)
    tile = {} if kernels is eager else {"tile": 16}
    check(kernels.dense_decode(*problem.args, **tile), problem.expected)


@both
def test_scores_of_minus_infinity_have_no_weight(kernels: ModuleType, dense_problem: Make) -> None:
    """A first tile without a finite score would turn the row into NaN."""
    q, k, v, seq_lens, scale = dense_problem([20]).args
    k[:, :16] = -math.inf
    tile = {} if kernels is eager else {"tile": 16}
    out, lse = kernels.dense_decode(q.abs(), k, v, seq_lens, scale, **tile)
    expected, expected_lse = kernels.dense_decode(q.abs(), k[:, 16:], v[:, 16:], seq_lens - 16, scale, **tile)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@both
def test_very_negative_rows_keep_their_softmax(kernels: ModuleType, dense_problem: Make) -> None:
    """A finite stand-in for -inf would swallow rows whose scores all lie below it."""
    q, k, v, seq_lens, scale = dense_problem([9], dtype=torch.float32).args
    out, lse = kernels.dense_decode(torch.full_like(q, -1e16), torch.full_like(k, 1e16), v, seq_lens, scale)
    assert bool((lse < -1e32).all())
    torch.testing.assert_close(out, v[:, :9].mean(1).expand_as(out))


def test_no_sequences(dense_problem: Make) -> None:
    """A batch that drained would crash instead of returning nothing."""
    q, k, v, seq_lens, scale = dense_problem([2]).args
    for kernels in (launch, eager):
        out, lse = kernels.dense_decode(q[:0], k[:0], v[:0], seq_lens[:0], scale)
        assert (out.shape, lse.shape) == ((0, 2, 8), (0, 2))


paged_and_eager = pytest.mark.parametrize("kernels", [launch_paged, eager], ids=["triton", "eager"])


@paged_and_eager
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


@paged_and_eager
def test_split_boundaries_follow_the_length(kernels: ModuleType, paged_problem: Make) -> None:
    """5 tokens in 4 splits are 2 + 2 + 1 + 0; another cut would leave work unbalanced or the last split too long."""
    problem = paged_problem([5], heads=(1, 1), dtype=torch.float32)
    _, lse = kernels.split_decode(*problem.args, 4)
    scores = (problem.q[0, 0] * problem.keys[0][:, 0]).sum(-1) * problem.args[5]
    expected = torch.stack([scores[:2].logsumexp(0), scores[2:4].logsumexp(0), scores[4], torch.tensor(-math.inf)])
    torch.testing.assert_close(lse[0, 0], expected)


@paged_and_eager
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


@paged_and_eager
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


@paged_and_eager
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
