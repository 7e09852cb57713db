"""The bound with a soft cap, ALiBi and sinks from both sides: however a right kernel writes them, and no wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.numerics import attention_bound, error_ratio
from attnfuzz.numerics.arithmetic import FLOAT32_ROUNDOFF, TANH_ERROR
from attnfuzz.problems.declared_numerics import Numerics

F32 = torch.float32
STRICT = Numerics(probabilities="float32", partials="float32", matmul="ieee")
HEADS, KV_HEADS = 4, 2
Tanh = Callable[[Tensor], Tensor]
Result = tuple[Tensor, Tensor]

TANHS: dict[str, Tanh] = {
    "library": torch.tanh,
    "1 - 2 / (E + 1)": lambda y: 1 - 2 / ((2 * y).exp() + 1),
    "2 sigmoid - 1": lambda y: 2 * (2 * y).sigmoid() - 1,
    "(1 - e) / (1 + e)": lambda y: y.sign() * (1 - (-2 * y.abs()).exp()) / (1 + (-2 * y.abs()).exp()),
    "two exponentials": lambda y: (y.exp() - (-y).exp()) / (y.exp() + (-y).exp()),
}


def drawn(seed: int, seq_len: int = 97, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """q, K and V, exact in float16; `size`: of the scores, at a scale of 0.125."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, 64), (seq_len, KV_HEADS, 64), (seq_len, KV_HEADS, 64))
    q, k, v = (torch.randn(shape, generator=generator).half().double() for shape in shapes)
    return (q * size).half().double(), k, v


def scores_of(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return torch.einsum("hd,hnd->hn", q, k.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1)) * scale


def attend(scores: Tensor, v: Tensor, sinks: Tensor | None = None) -> Result:
    v = v.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1).to(scores.dtype)
    terms = scores if sinks is None else torch.cat([scores, sinks[:, None].to(scores.dtype)], -1)
    return torch.einsum("hn,hnd->hd", terms.softmax(-1)[:, : v.shape[1]], v), terms.logsumexp(-1)


def ratios(got: Result, expected: Result, given: tuple[Tensor, Tensor, Tensor], **more: Any) -> tuple[float, float]:
    keywords: dict[str, Any] = {"in_dtype": torch.float16, "out_dtype": F32, "numerics": STRICT} | more
    bound = attention_bound(*given, 0.125, **keywords)
    out, lse = (error_ratio(a, b, c) for a, b, c in zip(got, expected, (bound.out, bound.lse), strict=True))
    return out.max().item(), lse.max().item()


def distances(seq_len: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(1 - seq_len, 1, dtype=dtype)


@pytest.mark.parametrize("name", TANHS)
def test_tanh_stays_within_its_error(name: str) -> None:
    """A right way to write tanh in float32 would be called a bug, or the allowance cover a coarser one."""
    y = torch.linspace(-20, 20, 200_001, dtype=F32)
    error = (TANHS[name](y).double() - y.double().tanh()).abs().max().item()
    assert error < TANH_ERROR
    assert TANH_ERROR < 16 * FLOAT32_ROUNDOFF


@pytest.mark.by_day
@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("name", TANHS)
def test_capped_scores_stay_below_the_bound(name: str, size: float) -> None:
    """Kernels that cap scores would be blamed for rounding them."""
    worst = (0.0, 0.0)
    caps = (0.5, 5.0, 30.0, 50.0) if name != "two exponentials" or size < 30 else (5.0, 30.0, 50.0)  # exp overflows
    for seed, cap in enumerate(caps):
        q, k, v = given = drawn(seed, size=size)
        exact = attend(cap * torch.tanh(scores_of(q, k, 0.125) / cap), v)
        x = scores_of(q.float(), k.float(), 0.125)
        for pre in (x / cap, x * (1 / torch.tensor(cap)), scores_of(q.float(), k.float(), 0.125 / cap)):
            found = ratios(attend(cap * TANHS[name](pre), v), exact, given, soft_cap=cap)
            worst = (max(worst[0], found[0]), max(worst[1], found[1]))
    assert max(worst) < 1
    assert worst[0] > 0.002


def test_an_approximate_tanh_must_be_declared() -> None:
    """Three digits would be lost silently, or FlashAttention's way of writing it be no kernel's right."""
    q, k, v = given = drawn(3, size=4.0)
    exact = attend(30 * torch.tanh(scores_of(q, k, 0.125) / 30), v)
    coarse = torch.tanh(scores_of(q.float(), k.float(), 0.125) / 30)
    coarse = coarse * (1 + 2.0**-12 * torch.where(torch.arange(coarse.shape[1]) % 2 == 0, 1, -1))
    got = attend(30 * coarse, v)
    declared = Numerics(probabilities="float32", partials="float32", matmul="ieee", tanh="approximate")
    assert max(ratios(got, exact, given, soft_cap=30.0, numerics=declared)) < 1
    assert ratios(got, exact, given, soft_cap=30.0)[0] > 10


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_mistakes_with_a_cap_are_found(size: float) -> None:
    """The bound would excuse a cap that is forgotten, applied to raw scores, or a percent off."""
    q, k, v = given = drawn(5, size=size)
    x, cap = scores_of(q, k, 0.125), 5.0
    exact = attend(cap * torch.tanh(x / cap), v)
    for wrong in (x, 0.125 * cap * torch.tanh(x / 0.125 / cap), 5.05 * torch.tanh(x / 5.05), x.clamp(-cap, cap)):
        assert min(ratios(attend(wrong, v), exact, given, soft_cap=cap)) > 5


@pytest.mark.parametrize("how", ["distance", "position", "base 2"])
def test_biased_scores_stay_below_the_bound(how: str) -> None:
    """ALiBi written with distances, with positions alone or in base 2 would be called wrong."""
    worst = (0.0, 0.0)
    for seed, seq_len in enumerate((1, 17, 97, 1024)):
        q, k, v = given = drawn(seed, seq_len)
        slopes = torch.tensor([0.5, 0.0625, 0.9375, 0.34], dtype=F32).double()
        exact = attend(scores_of(q, k, 0.125) + slopes[:, None] * distances(seq_len, torch.float64), v)
        x, m = scores_of(q.float(), k.float(), 0.125), slopes.float()[:, None]
        if how == "position":
            out, lse = attend(x + m * torch.arange(seq_len), v)
            got = out, lse - (m * (seq_len - 1))[:, 0]
        elif how == "base 2":
            log2e = torch.tensor(1.4426950408889634)
            exponents = x * log2e + (m * log2e) * distances(seq_len, F32)
            top = exponents.amax(-1, keepdim=True)
            weights = torch.exp2(exponents - top)
            total = weights.sum(-1, keepdim=True)
            out = torch.einsum("hn,hnd->hd", weights, v.float().repeat_interleave(2, 1).transpose(0, 1)) / total
            got = out, ((top + total.log2()) * torch.tensor(0.6931471805599453))[:, 0]
        else:
            got = attend(x + m * distances(seq_len, F32), v)
        found = ratios(got, exact, given, alibi_slopes=slopes)
        worst = (max(worst[0], found[0]), max(worst[1], found[1]))
    assert max(worst) < 1
    assert worst[0] > 0.005


def test_mistakes_with_alibi_are_found() -> None:
    """The bound would excuse another head's slope, distances off by one, or the wrong sign."""
    seq_len = 97
    q, k, v = given = drawn(7, seq_len)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    x, d = scores_of(q, k, 0.125), distances(seq_len, torch.float64)
    exact = attend(x + slopes[:, None] * d, v)
    for wrong in (x - slopes[:, None] * d, x + slopes[[0, 0, 1, 1], None] * d, x + 1.01 * slopes[:, None] * d, x):
        assert min(ratios(attend(wrong, v), exact, given, alibi_slopes=slopes)) > 5
    off_by_one = attend(x + slopes[:, None] * (d - 1), v)  # which moves all scores alike
    assert ratios(off_by_one, exact, given, alibi_slopes=slopes)[1] > 100


@pytest.mark.parametrize("how", ["a term", "a stage of its own"])
@pytest.mark.parametrize("level", [-40.0, 0.0, 3.5, 40.0])
def test_sinks_stay_below_the_bound(level: float, how: str) -> None:
    """A kernel that adds the sink afterwards, to a rounded LSE, would be called wrong; or one far from all scores."""
    for seed, seq_len in enumerate((0, 1, 33, 257)):
        q, k, v = given = drawn(seed, seq_len)
        sinks = torch.tensor([level, level + 0.125, level - 2, level + 1], dtype=torch.float64)
        exact = attend(scores_of(q, k, 0.125), v, sinks)
        x = scores_of(q.float(), k.float(), 0.125)
        if how == "a term" or seq_len == 0:
            got = attend(x, v, sinks)
        else:
            out, lse = attend(x, v)
            got = out * (lse - sinks.float()).sigmoid()[:, None], lse.logaddexp(sinks.float())
        assert max(ratios(got, exact, given, sinks=sinks)) < 1


def test_mistakes_with_sinks_are_found() -> None:
    """The bound would excuse a sink that is counted twice, left out, or another head's."""
    q, k, v = given = drawn(9, 33)
    sinks = torch.tensor([0.5, 1.0, -0.25, 2.0], dtype=torch.float64)
    x = scores_of(q, k, 0.125)
    exact = attend(x, v, sinks)
    for wrong in (attend(x, v), attend(x, v, sinks + 0.6931), attend(x, v, sinks[[0, 0, 1, 1]])):
        assert min(ratios(wrong, exact, given, sinks=sinks)) > 5


def test_plain_attention_has_the_same_bound_as_ever() -> None:
    """Cases without variants would be judged with the slack of those that have some."""
    given = drawn(11)
    plain = attention_bound(*given, 0.125, in_dtype=torch.float16, out_dtype=F32, numerics=STRICT)
    tiny = torch.full((HEADS,), -1e4, dtype=torch.float64)
    sunk = attention_bound(*given, 0.125, in_dtype=torch.float16, out_dtype=F32, numerics=STRICT, sinks=tiny)
    assert bool((plain.out <= sunk.out).all())
    assert bool((sunk.out < 4 * plain.out).all())
