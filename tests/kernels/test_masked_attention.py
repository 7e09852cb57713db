"""Attention under a mask, Triton and eager, against float64 by the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.kernels import eager_attention
from attnfuzz.kernels.masked import launch

Make = Callable[..., Any]
KERNELS = {"naive": partial(launch.masked_attention, tile=4), "eager": eager_attention.masked_attention}

every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)

LENS = [7, 3, 5, 0, 9, 1]
QUERIES = [2, 3, 0, 0, 4, 1]
NAMES = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q", "mask", "mask_indptr")


def problem(paged_problem: Make, *, share: float = 0.5, **more: Any) -> tuple[tuple[Any, ...], tuple[Tensor, Tensor]]:
    """Arguments, and what must come out, of a mask that shows a random ``share`` of the keys, but none to some."""
    decode = paged_problem(LENS, **more)
    _, k_cache, v_cache, table, seq_lens, scale, block_size, layout = decode.args
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    q = torch.randn((sum(QUERIES), *decode.q.shape[1:]), generator=generator).to(decode.q.dtype)
    tables = [torch.rand((n, length), generator=generator) < share for n, length in zip(QUERIES, LENS, strict=True)]
    tables[0][1] = False
    tables[4][2, :5] = False  # a whole tile and more
    starts, begins = (
        torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)
        for sizes in (QUERIES, [len(seen.flatten()) for seen in tables])
    )
    mask = torch.cat([seen.flatten() for seen in tables])
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    rows = [(seq, seen) for seq, table_of_seq in enumerate(tables) for seen in table_of_seq]
    for row, (seq, seen) in enumerate(rows):
        for head in range(q.shape[1] if bool(seen.any()) else 0):
            kv_head = head * decode.keys[seq].shape[1] // q.shape[1]
            weights = torch.exp(decode.keys[seq][seen, kv_head].double() @ q[row, head].double() * scale)
            out[row, head] = weights @ decode.values[seq][seen, kv_head].double() / weights.sum()
            lse[row, head] = weights.sum().log()
    return (q, k_cache, v_cache, table, seq_lens, starts, mask, begins, scale, block_size, layout), (out, lse)


@every_kernel
@pytest.mark.parametrize("layout", ["NHD", "HND", "packed", "interleaved"])
@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.by_day("3-*")
def test_any_keys(kernel: Make, layout: str, block_size: int, paged_problem: Make, check: Make) -> None:
    """A query would see keys that are hidden from it, or those of another row of the mask."""
    args, expected = problem(paged_problem, layout=layout, block_size=block_size)
    check(kernel(*args), expected)


@every_kernel
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_keys_and_none(kernel: Make, share: float, paged_problem: Make, check: Make) -> None:
    """Cross attention would be causal, or a row that sees nothing come out as NaN."""
    args, expected = problem(paged_problem, share=share)
    check(kernel(*args), expected)


@every_kernel
def test_rows_beyond_the_batch_come_out_empty(kernel: Make, paged_problem: Make, check: Make) -> None:
    """A captured graph whose q has room for more tokens than came would read the mask past its end."""
    args, expected = problem(paged_problem)
    q = torch.cat([args[0], torch.full_like(args[0][:2], math.nan)])
    got_out, got_lse = kernel(q, *args[1:])
    check((got_out[:-2], got_lse[:-2]), expected)
    assert got_out[-2:].eq(0).all()
    assert got_lse[-2:].isneginf().all()


@every_kernel
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.float32}, r"mask.dtype=torch.float32 must be torch.bool"),
        ({"mask_indptr": torch.float32}, r"mask_indptr.dtype=torch.float32 must be torch.int32 or torch.int64"),
    ],
)
def test_wrong_arguments(kernel: Make, change: dict[str, torch.dtype], message: str, paged_problem: Make) -> None:
    """Numbers that are added to scores, as other libraries' masks are, would be taken for yes and no."""
    args, _ = problem(paged_problem)
    given = dict(zip(NAMES, args[:8], strict=True))
    given |= {name: given[name].to(dtype) for name, dtype in change.items()}
    with pytest.raises(ValueError, match=message):
        kernel(**given, scale=args[8], block_size=args[9], layout=args[10])
