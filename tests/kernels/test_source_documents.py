"""What the texts that the kernels follow test themselves, by their names, sizes and tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnfuzz.kernels.dense.launch import dense_decode
from attnfuzz.kernels.merge.launch import merge_states, merge_states_wide
from attnfuzz.kernels.paged import launch as launch_paged
from attnfuzz.kernels.paged.num_splits import one_per_sm_num_splits

Make = Callable[..., Any]

paged_decode: Make = launch_paged.paged_decode
split_paged_decode: Make = launch_paged.split_paged_decode

_QWEN_7B: dict[str, Any] = {"heads": (28, 4), "head_size": 128}


@pytest.mark.parametrize(
    ("batch", "seq_len"),
    [
        pytest.param(1, 128, id="single"),
        pytest.param(8, 128, id="batch", marks=pytest.mark.night),
        pytest.param(1, 2048, id="long_seq", marks=pytest.mark.night),
        pytest.param(1, 100, id="seq_not_multiple_of_block"),
    ],
)
def test_triton_attn(batch: int, seq_len: int, dense_problem: Make, check: Make) -> None:
    """The dense kernel would be off for Qwen2.5-7B; its text allows 1e-2, rounding the result explains less."""
    problem = dense_problem([seq_len] * batch, **_QWEN_7B)
    check(dense_decode(*problem.args, tile=64), problem.expected)


@pytest.mark.parametrize(
    ("seq_len", "num_q_heads", "expected"),
    [
        *((n, 12, splits) for n, splits in ((128, 2), (512, 8), (704, 11), (1024, 11), (2048, 11), (4096, 11))),
        *((n, 28, 5) for n in (1024, 2048, 4096)),
    ],
)
def test_auto_num_splits(seq_len: int, num_q_heads: int, expected: int) -> None:
    """Other numbers of splits than in the tables of split-K decoding, on 128 multiprocessors, would be measured."""
    assert one_per_sm_num_splits(seq_len, num_q_heads, 128) == expected


@pytest.mark.parametrize("num_splits", [1, 2, 11])
def test_split_k_agrees_with_the_plain_kernel(num_splits: int, paged_problem: Make) -> None:
    """One split would not be the plain kernel, to 1e-3, or eleven not one."""
    args = paged_problem([100, 704], heads=(4, 2), head_size=64, block_size=16).args
    out, lse = split_paged_decode(*args, num_splits, tile=64)
    expected, expected_lse = paged_decode(*args, tile=64)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "head_size"),
    [
        (256, 4, 32),
        (613, 8, 48),
        *(pytest.param(*shape, marks=pytest.mark.night) for shape in ((512, 16, 32), (1024, 32, 96), (4096, 64, 256))),
    ],
)
def test_merge_attn_states(num_tokens: int, num_heads: int, head_size: int, dtype: torch.dtype, merge: Make) -> None:
    """Merging would not stand vLLM's own test: LSEs of +inf on either side, in turn, and never on both."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    lses = [torch.randn(num_heads, num_tokens, generator=generator) for _ in range(2)]
    is_empty = [torch.rand(num_heads, num_tokens, generator=generator) < 0.1 for _ in range(2)]
    both = is_empty[0] & is_empty[1]
    lses = [lse.masked_fill(empty & ~both, math.inf) for lse, empty in zip(lses, is_empty, strict=True)]
    outs = [torch.randn(num_tokens, num_heads, head_size, generator=generator).to(dtype) for _ in range(2)]
    states = [(out, lse.t()) for out, lse in zip(outs, lses, strict=True)]
    expected, expected_lse = merge(states)
    got, lse = merge_states_wide(outs[0], lses[0], outs[1], lses[1])
    torch.testing.assert_close(got.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-3)
    torch.testing.assert_close(lse.t().double(), expected_lse, rtol=1e-3, atol=1e-3)
    some = slice(7)  # a program for each token and head
    plain, plain_lse = merge_states(outs[0][some], lses[0][:, some], outs[1][some], lses[1][:, some])
    torch.testing.assert_close(plain, got[some])
    torch.testing.assert_close(plain_lse, lse[:, some])


@pytest.mark.parametrize("empty", [math.inf, -math.inf])
def test_merging_two_empty_states(empty: float) -> None:
    """exp(-inf + inf) would make NaN of rows that no key belongs to."""
    out, lse = torch.full((3, 2, 16), math.nan, dtype=torch.float16), torch.full((2, 3), empty)
    for function in (merge_states, merge_states_wide):
        merged, merged_lse = function(out, lse, out, lse)
        assert not merged.any()
        assert bool(merged_lse.isneginf().all())
