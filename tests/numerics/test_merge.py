"""Error bounds of merged states, whoever merges them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnfuzz.numerics import attention_bound, error_ratio, merge_bound
from attnfuzz.problems.declared_numerics import Numerics

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
INF = math.inf
States = tuple[Tensor, Tensor, Tensor, Tensor]


def states(dtype: torch.dtype, lse_scale: float, seed: int = 0) -> States:
    """Prefix and suffix outputs `[40, 3, 16]` and LSEs `[40, 3]` in float64, exact in `dtype` and float32."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(2, 40, 3, 16, generator=generator).to(dtype).double()
    lses = (torch.randn(2, 40, 3, generator=generator) * lse_scale).double()
    return outputs[0], outputs[1], lses[0], lses[1]


def merged(
    inputs: States, precision: torch.dtype, *, base2: bool = False, by_lse: bool = False
) -> tuple[Tensor, Tensor]:
    """Merge in `precision`; exact for float64. `by_lse`: with the weights exp(lse_s - lse), nothing is divided."""
    prefix, suffix, prefix_lse, suffix_lse = (x.to(precision) for x in inputs)
    to_base = torch.tensor(math.log2(math.e) if base2 else 1.0, dtype=precision)
    exp, log = (torch.exp2, torch.log2) if base2 else (torch.exp, torch.log)
    prefix_lse, suffix_lse = prefix_lse * to_base, suffix_lse * to_base
    largest = torch.maximum(prefix_lse, suffix_lse)
    prefix_weight, suffix_weight = exp(prefix_lse - largest), exp(suffix_lse - largest)
    total = prefix_weight + suffix_weight
    out = prefix * (prefix_weight / total)[..., None] + suffix * (suffix_weight / total)[..., None]
    lse = (log(total) + largest) * torch.tensor(math.log(2) if base2 else 1.0, dtype=precision)
    if by_lse:
        weights = [exp(part - lse * to_base)[..., None] for part in (prefix_lse, suffix_lse)]
        out = prefix * weights[0] + suffix * weights[1]
    return out, lse


@pytest.mark.parametrize("by_lse", [False, True], ids=["divided", "by lse"])
@pytest.mark.parametrize("base2", [False, True], ids=["natural", "base 2"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_correct_merges_stay_below_the_bound_closely(dtype: torch.dtype, base2: bool, by_lse: bool) -> None:
    """Float32 merges in either base must pass for any LSEs, and the bound must not be far above their errors.

    It is that of weights exp(lse_s - lse), each of whose exponents is rounded by itself, where a sum that divides has
    the same roundings as what it divides: there errors are half as large.
    """
    out_ratios, lse_ratios = [], []
    for seed, lse_scale in enumerate([0.0, 0.1, 1.0, 10.0, 100.0, 1e4, 1e30]):
        inputs = states(dtype, lse_scale, seed)
        bound = merge_bound(*inputs, out_dtype=dtype)
        (out, lse), (got_out, got_lse) = merged(inputs, torch.float64), merged(inputs, F32, base2=base2, by_lse=by_lse)
        out_ratios.append(error_ratio(got_out.to(dtype), out, bound.out).max().item())
        lse_ratios.append(error_ratio(got_lse, lse, bound.lse).max().item())
    assert ((0.06 if by_lse else 0.03) if dtype == F32 else 0.9) < max(out_ratios) < 1
    assert 0.03 < max(lse_ratios) < 1


@pytest.mark.parametrize("interpolates", [True, False], ids=["a - w (a - b)", "1 - w"])
def test_what_one_weight_leaves_of_1_may_be_the_other(interpolates: bool) -> None:
    """Ring attention's update would be accused, whose small weight is as far off as the large one."""
    ratios = []
    for apart in (2.0, 5.0, 8.0, 11.0):
        inputs = states(F32, 1.0)
        inputs[0].mul_(2.0**-14)
        inputs[2].add_(apart)
        a, b, lse_a, lse_b = (x.to(F32) for x in inputs)
        w = torch.sigmoid(lse_a - lse_b)[..., None]
        got = b - w * (b - a) if interpolates else w * a + (1 - w) * b
        out, _ = merged(inputs, torch.float64)
        ratios.append(error_ratio(got, out, merge_bound(*inputs, out_dtype=F32).out).max().item())
    assert 0.2 < max(ratios) < 1


def test_swapped_weights_are_found() -> None:
    """Giving the prefix the suffix's weight is the plainest merge bug."""
    inputs = states(F16, 1.0)
    out, _ = merged(inputs, torch.float64)
    prefix, suffix, prefix_lse, suffix_lse = inputs
    wrong, _ = merged((prefix, suffix, suffix_lse, prefix_lse), F32)
    assert error_ratio(wrong.half(), out, merge_bound(*inputs, out_dtype=F16).out).median().item() > 50


def test_an_lse_left_in_base_2_is_found() -> None:
    """A result in the wrong base is off by a factor of log 2, far above rounding."""
    inputs = states(F16, 1.0)
    _, lse = merged(inputs, torch.float64)
    assert error_ratio(lse.float() * 1.4427, lse, merge_bound(*inputs, out_dtype=F16).lse).median().item() > 1e4


def test_an_empty_side_contributes_nothing_even_if_nan() -> None:
    """The output of an empty side is never read: its contents must not reach the bound."""
    prefix, suffix, prefix_lse, suffix_lse = states(F16, 1.0)
    empty = torch.full_like(prefix_lse, -INF)
    bound = merge_bound(torch.full_like(prefix, torch.nan), suffix, empty, suffix_lse, out_dtype=F16)
    assert error_ratio(suffix.half(), suffix, bound.out).max().item() == 0
    one_ulp_and_a_half = suffix * (1 + 1.5 * 2.0**-10)
    assert error_ratio(one_ulp_and_a_half, suffix, bound.out).min().item() > 1
    assert bool((bound.lse > 0).all())


def test_two_empty_sides_must_be_exact() -> None:
    """Nothing merged with nothing is 0 and -inf: any bound above 0 would hide an unwritten row."""
    prefix, suffix, prefix_lse, suffix_lse = states(F32, 1.0)
    prefix_lse[0], suffix_lse[0] = -INF, -INF
    prefix[0] = torch.nan
    bound = merge_bound(prefix, suffix, prefix_lse, suffix_lse, out_dtype=F32)
    assert not bound.out[0].any()
    assert not bound.lse[0].any()
    assert bool((bound.out[1:] > 0).all())


@pytest.mark.parametrize("wrong", [INF, math.nan])
def test_unnormalised_lses_are_refused(wrong: float) -> None:
    """+inf means empty only before it is normalised: a bound computed from it would be NaN."""
    prefix, suffix, prefix_lse, suffix_lse = states(F16, 1.0)
    prefix_lse[3, 1] = wrong
    with pytest.raises(ValueError, match=r"replace \+inf by -inf"):
        merge_bound(prefix, suffix, prefix_lse, suffix_lse, out_dtype=F16)


def test_a_merge_that_drops_bits_is_found() -> None:
    """A merge that makes bfloat16 numbers by dropping bits errs by up to twice as much as one that rounds."""
    inputs = states(BF16, 1.0)
    out, _ = merged(inputs, torch.float64)
    exact, bound = merged(inputs, F32)[0], merge_bound(*inputs, out_dtype=BF16).out
    assert error_ratio((exact.view(torch.int32) >> 16 << 16).view(F32), out, bound).max().item() > 1
    assert error_ratio(exact.to(BF16), out, bound).max().item() < 1


F64 = torch.float64
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
    q, k, v = drawn(logit_scale)
    exact = q.to(F64), k.to(F64), v.to(F64)
    (got, _), (expected, _) = combined(q, k, v, splits), combined(*exact, splits)
    bound = attention_bound(
        *exact, 0.125, in_dtype=F32, out_dtype=F32, numerics=STRICT,
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
