"""Scores summed in all threads at once, in which compilers fuse a product with the addition: copies that differ."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from attnfuzz.numerics import attention_bound, error_ratio
from attnfuzz.problems.declared_numerics import Numerics

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LOGIT_SCALES = (0.3, 10.0, 100.0, 1000.0)
SIZES = ((1, 16), (6, 16), (40, 32), (3, 128))
SEEDS = range(12)


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`fma(a, b, c)` in float32: the product of two float32 numbers is exact in float64."""
    return (a.double() * b.double() + c.double()).float()


def score_copies(q: Tensor, k: Tensor) -> Tensor:
    """`q.k` as each of head_size lanes has it, `[num_tokens, head_size]`: a butterfly that begins with an fma."""
    lanes = torch.arange(len(q))
    products = q * k
    distance = len(q) // 2
    copies = fused(q.expand_as(k), k, products[:, lanes ^ distance])
    while distance := distance // 2:
        copies = copies + copies[:, lanes ^ distance]
    return copies


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Dimension d of the numerator has lane d's copy of each weight; maximum and denominator have lane 0's.

    q is scaled first: products of unscaled float16 or bfloat16 numbers are exact, and fusing them changes nothing.
    """
    scores = score_copies(q * torch.tensor(scale, dtype=torch.float32), k)
    weights = (scores - scores[:, 0].max()).exp()
    return (weights * v).sum(0) / weights[:, 0].sum()


def ratio(
    seq_len: int, head_size: int, dtype: torch.dtype, logit_scale: float, seed: int, *, one_copy: bool = False
) -> float:
    """Largest error over bound of a problem with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    q, *kv = (torch.randn(n, head_size, generator=generator).to(dtype) for n in (1, seq_len, seq_len))
    q, k, v = (q * logit_scale).to(dtype).double(), *(x.double() for x in kv)
    scale = head_size**-0.5
    exact = (scale * q @ k.T).softmax(-1) @ v
    bound = attention_bound(
        q,
        k[:, None],
        v[:, None],
        scale,
        in_dtype=dtype,
        out_dtype=torch.float32,
        numerics=Numerics(probabilities="float32", partials="float32", matmul="ieee"),
        one_copy=one_copy,
    )
    out = attend(q[0].float(), k.float(), v.float(), scale)
    return error_ratio(out[None], exact, bound.out).max().item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_whose_threads_round_a_score_differently_stay_below_the_bound(dtype: torch.dtype) -> None:
    """Every Triton kernel that sums one product per thread would be accused, as the bundled ones once were."""
    problems = itertools.product(SIZES, LOGIT_SCALES, SEEDS)
    largest = max(ratio(*size, dtype, logit_scale, seed) for size, logit_scale, seed in problems)
    assert 0.05 < largest < 1


def test_one_copy_of_each_score_would_not_explain_them() -> None:
    """The emulated kernel must show the effect, or the tests beside this one would prove nothing."""
    assert max(ratio(1, 16, torch.float32, 100.0, seed, one_copy=True) for seed in SEEDS) > 1


def test_a_single_token_shows_it_best() -> None:
    """A weight over itself is 1 whatever the score: what remains is the difference of two copies alone."""
    q, k = torch.randn(2, 50, 16, generator=torch.Generator().manual_seed(1))
    copies = torch.cat([score_copies(*pair) for pair in zip(q, k[:, None], strict=True)])
    assert sum(len(set(row)) > 1 for row in copies.tolist()) > 5
    exact = [math.fsum(row) for row in (q.double() * k.double()).tolist()]
    torch.testing.assert_close(copies.double(), torch.tensor(exact).double()[:, None].expand(-1, 16), rtol=0, atol=1e-5)
