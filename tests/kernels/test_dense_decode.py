"""Dense decode, Triton and eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from attnfuzz.kernels import eager
from attnfuzz.kernels.dense import launch

Make = Callable[..., Any]
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
