"""Weights exp(x - lse) that nothing divides by their sum: splits, ranks and states that are merged so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnfuzz.numerics import attention_bound, error_ratio, merge_bound
from attnfuzz.problems.declared_numerics import Numerics

F32, F64 = torch.float32, torch.float64
STRICT = Numerics(probabilities="float32", partials="float32", matmul="ieee")
LOGIT_SCALES = (1.0, 30.0, 1000.0)


def drawn(logit_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Four keys share all weight; V hardly differs, so that what all weights have in common is what moves it."""
    generator = torch.Generator().manual_seed(round(logit_scale))
    q, k, v = (torch.randn(*shape, generator=generator) for shape in ((1, 64), (48, 1, 64), (48, 1, 32)))
    keys = torch.where(torch.arange(48)[:, None, None] < 4, q, k)
    return q, keys * logit_scale, 1e-3 * v + 3


def combined(q: Tensor, k: Tensor, v: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """One query head; each split's tokens weighed by its own LSE, and splits by that of all."""
    scores = (k[:, 0] * q).sum(-1) * 0.125
    outs, lses = [], []
    for some, values in zip(scores.tensor_split(splits), v[:, 0].tensor_split(splits), strict=True):
        lses.append(some.logsumexp(0))
        outs.append((some - lses[-1]).exp() @ values)
    lse = torch.stack(lses).logsumexp(0)
    return ((torch.stack(lses) - lse).exp() @ torch.stack(outs))[None], lse[None]


def ratio(logit_scale: float, splits: int, num_partials: int) -> float:
    inputs = drawn(logit_scale)
    q, k, v = (part.to(F64) for part in inputs)
    (got, _), (expected, _) = combined(*inputs, splits), combined(q, k, v, splits)
    bound = attention_bound(
        q, k, v, 0.125, in_dtype=F32, out_dtype=F32, numerics=STRICT,
        num_partials=num_partials, one_copy=True,
    )  # fmt: skip
    return float(error_ratio(got, expected, bound.out).max())


@pytest.mark.parametrize("splits", [2, 7])
def test_splits_combined_by_their_lse_stay_below_the_bound(splits: int) -> None:
    """FlashAttention 2's combine and vLLM's context parallelism would be accused of wrong numbers."""
    assert max(ratio(scale, splits, 2) for scale in LOGIT_SCALES) < 1


def test_a_kernel_that_makes_no_parts_is_held_to_more() -> None:
    """The term would be given to kernels that have no use for it, and hide errors of scores."""
    assert max(ratio(scale, 2, 1) for scale in LOGIT_SCALES) > 1


@pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
def test_states_merged_by_their_lse_stay_below_the_bound(size: float) -> None:
    """A merge by logaddexp is right, and would be accused."""
    generator = torch.Generator().manual_seed(0)
    prefix, suffix = (torch.randn(200, 2, 16, generator=generator) + 3 for _ in range(2))
    one = torch.randn(200, 2, generator=generator) * size
    other = one + torch.randn(200, 2, generator=generator)
    lse = torch.logaddexp(one, other)
    got = prefix * (one - lse).exp()[..., None] + suffix * (other - lse).exp()[..., None]
    first, second, exact_one, exact_other = (part.to(F64) for part in (prefix, suffix, one, other))
    exact = torch.logaddexp(exact_one, exact_other)
    expected = first * (exact_one - exact).exp()[..., None] + second * (exact_other - exact).exp()[..., None]
    bound = merge_bound(first, second, exact_one, exact_other, out_dtype=F32)
    assert 0.02 < float(error_ratio(got, expected, bound.out).max()) < 1
