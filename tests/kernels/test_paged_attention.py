"""Causal attention of several query tokens per sequence, Triton and eager, against float64 by the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from attnfuzz.kernels import eager_attention
from attnfuzz.kernels.paged import launch_attention

Make = Callable[..., Any]
KERNELS = {"naive": partial(launch_attention.paged_attention, tile=4), "eager": eager_attention.paged_attention}

every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)

LENS = [7, 3, 5, 0, 9, 1]
QUERIES = [2, 3, 0, 0, 1, 1]
"""Behind a context, a prefill, idle twice, decode with and without a context."""


def rows_of(lens: list[int], queries: list[int], causal: bool) -> list[tuple[int, int]]:
    """Sequence and number of keys of each query token."""
    pairs = enumerate(zip(lens, queries, strict=True))
    return [(i, n - m + j + 1 if causal else n) for i, (n, m) in pairs for j in range(m)]


def problem(
    paged_problem: Make, lens: list[int], queries: list[int], causal: bool = True, **more: Any
) -> tuple[tuple[Any, ...], Any, Any]:
    """Arguments, bounds, and what must come out: each query token is a decode step over the keys up to itself."""
    decode = paged_problem(lens, **more)
    rows = rows_of(lens, queries, causal)
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    q = torch.randn((len(rows), *decode.q.shape[1:]), generator=generator).to(decode.q.dtype)
    _, k_cache, v_cache, table, seq_lens, scale, block_size, layout = decode.args
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    args = (q, k_cache, v_cache, table, seq_lens, starts, scale, block_size, layout)
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for row, (seq, count) in enumerate(rows):
        for head in range(q.shape[1]):
            kv_head = head * decode.keys[seq].shape[1] // q.shape[1]
            weights = torch.exp(decode.keys[seq][:count, kv_head].double() @ q[row, head].double() * scale)
            out[row, head] = weights @ decode.values[seq][:count, kv_head].double() / weights.sum()
            lse[row, head] = weights.sum().log()
    return args, {"max_query_len": max(queries), "max_seq_len": max(lens)}, (out, lse)


@every_kernel
@pytest.mark.parametrize("layout", ["NHD", "HND", "packed", "interleaved"])
@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.by_day("3-*")
def test_mixed_batches(kernel: Make, layout: str, block_size: int, paged_problem: Make, check: Make) -> None:
    """A query would see too many or too few keys, or those of another sequence, in some layout."""
    args, bounds, expected = problem(paged_problem, LENS, QUERIES, layout=layout, block_size=block_size)
    check(kernel(*args, **bounds), expected)


@every_kernel
@pytest.mark.parametrize("block_size", [1, 3])
def test_every_token_sees_all_where_nothing_is_causal(
    kernel: Make, block_size: int, paged_problem: Make, check: Make
) -> None:
    """An encoder's tokens would not see those behind them."""
    args, bounds, expected = problem(paged_problem, LENS, QUERIES, causal=False, block_size=block_size)
    check(kernel(*args, **bounds, causal=False), expected)


@every_kernel
@pytest.mark.parametrize("queries", [[0, 0, 4], [4, 0, 0], [0, 1, 0], [4, 4, 4]])
def test_idle_sequences_anywhere(kernel: Make, queries: list[int], paged_problem: Make, check: Make) -> None:
    """The search for a token's sequence would stop at one without query tokens."""
    args, bounds, expected = problem(paged_problem, [4, 4, 4], queries)
    check(kernel(*args, **bounds), expected)


@every_kernel
def test_rows_beyond_the_batch_come_out_empty(kernel: Make, paged_problem: Make, check: Make) -> None:
    """A captured graph whose q has room for more tokens than came would read memory of no sequence."""
    args, bounds, (out, lse) = problem(paged_problem, LENS, QUERIES)
    q = torch.cat([args[0], torch.full_like(args[0][:2], math.nan)])
    got_out, got_lse = kernel(q, *args[1:], **bounds)
    check((got_out[:-2], got_lse[:-2]), (out, lse))
    assert got_out[-2:].eq(0).all()
    assert got_lse[-2:].isneginf().all()


@every_kernel
def test_no_query_token_at_all(kernel: Make, paged_problem: Make) -> None:
    """An engine's idle step would fail to launch."""
    args, _, _ = problem(paged_problem, [3], [1])
    starts = torch.zeros(2, dtype=torch.int32)
    out, lse = kernel(args[0][:0], *args[1:5], starts, *args[6:], max_query_len=1, max_seq_len=3)
    assert out.shape == (0, 2, 8)
    assert lse.shape == (0, 2)


@every_kernel
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": [0, 1]}, r"cu_seqlens_q.shape=\[2\] must be \[num_seqs \+ 1\] with num_seqs=6"),
        ({"max_query_len": 0}, r"max_query_len=0 must be an integer of at least 1"),
        ({"max_seq_len": 0}, r"max_seq_len=0 must be an integer of at least 1"),
    ],
)
def test_wrong_arguments(kernel: Make, change: dict[str, Any], message: str, paged_problem: Make) -> None:
    """A slip in the metadata would be read past its end on the device."""
    args, bounds, _ = problem(paged_problem, LENS, QUERIES)
    named = dict(zip(("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q"), args[:6], strict=True))
    given = {**named, "scale": args[6], "block_size": args[7], "layout": args[8], **bounds, **change}
    given["cu_seqlens_q"] = torch.as_tensor(given["cu_seqlens_q"], dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        kernel(**given)
