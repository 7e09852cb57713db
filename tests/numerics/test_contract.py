"""What error bounds promise: of declarations, of copies of a score, and of steps in float32."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import attnfuzz.numerics.bounds as attention_module
from attnfuzz.numerics import Bound, attention_bound, error_ratio
from attnfuzz.numerics.rounded import Rounded, exactly
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.recipes import Values
from attnfuzz.values import attention_values


@dataclass(frozen=True)
class Problem:
    """One sequence of float16 values in float64: 4 query heads on 2 KV heads."""

    q: Tensor
    k: Tensor
    v: Tensor

    def bound(self, numerics: Numerics, **more: Any) -> Bound:
        keywords: dict[str, Any] = {"in_dtype": torch.float16, "out_dtype": torch.float16, "numerics": numerics} | more
        return attention_bound(self.q, self.k, self.v, self.q.shape[-1] ** -0.5, **keywords)


def problem(seq_len: int, head_size: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    shapes = (4, head_size), (seq_len, 2, head_size), (seq_len, 2, head_size)
    return Problem(*(torch.randn(shape, generator=generator).half().double() for shape in shapes))


def test_looser_declarations_never_tighten_the_bound() -> None:
    """Each rounding a kernel declares must be allowed for; otherwise declaring it would cause false alarms."""
    given = problem(100, 64)
    order = [
        Numerics(probabilities="float32", partials="float32", matmul="ieee"),
        Numerics(probabilities="float32", partials="float32"),
        Numerics(probabilities="input", partials="float32"),
        Numerics(),
        Numerics(matmul="tf32"),
    ]
    bounds = [given.bound(numerics, num_partials=4).out for numerics in order]
    assert all(bool((loose > tight).all()) for tight, loose in pairwise(bounds))


def test_an_empty_sequence_must_be_exact() -> None:
    """Length 0 gives out = 0 and lse = -inf without arithmetic: any bound above 0 would hide an unwritten row."""
    given = problem(1, 16)
    bound = replace(given, k=given.k[:0], v=given.v[:0]).bound(Numerics())
    assert bound.out.shape == (4, 16)
    assert not bound.out.any()
    assert not bound.lse.any()


def test_heads_in_chunks_give_the_same_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences are bounded a few heads at a time; a head paired with the wrong KV head would show here."""
    given = problem(33, 16)
    whole = given.bound(Numerics())
    monkeypatch.setattr(attention_module, "_LARGEST_CHUNK", 33 * 16 * 3)
    chunked = given.bound(Numerics())
    torch.testing.assert_close(chunked.out, whole.out, rtol=1e-12, atol=0)
    torch.testing.assert_close(chunked.lse, whole.lse, rtol=1e-12, atol=0)


def test_each_query_head_reads_its_own_kv_head() -> None:
    """Query heads 2 and 3 of 4 belong to KV head 1 of 2: their bounds must not depend on KV head 0."""
    given = problem(33, 16)
    alone = replace(given, q=given.q[2:], k=given.k[:, 1:], v=given.v[:, 1:]).bound(Numerics())
    torch.testing.assert_close(given.bound(Numerics()).out[2:], alone.out, rtol=1e-12, atol=0)


def test_wrong_arguments_name_the_remedy() -> None:
    """A caller's mistake must not become a bound of the wrong shape."""
    given = problem(3, 16)
    with pytest.raises(ValueError, match="num_partials=0 must be at least 1"):
        given.bound(Numerics(), num_partials=0)
    with pytest.raises(ValueError, match="num_q_heads=3 must be a multiple of num_kv_heads=2"):
        replace(given, q=given.q[:3]).bound(Numerics())
    with pytest.raises(ValueError, match=r"dtype=torch.float64 must be one of"):
        given.bound(Numerics(), out_dtype=torch.float64)


DTYPES = (torch.float16, torch.bfloat16)
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def bound_of(scores: Tensor, dtype: torch.dtype, numerics: Numerics) -> Bound:
    """Of one head of size 1 with a query of 1: its keys are the scores. Values are 1."""
    k = scores.double().view(-1, 1, 1)
    return attention_bound(
        k.new_ones(1, 1), k, torch.ones_like(k), 1.0, in_dtype=dtype, out_dtype=dtype, numerics=numerics
    )


def rounded_sum_lse(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """As FlashInfer has it: the largest, and the log of a float32 sum of rounded weights."""
    return scores.max() + (scores - scores.max()).exp().to(dtype).float().sum().log()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part", [0.0, 0.1, 0.4, 0.49, 0.51, 0.6, 0.99, 1.4, 2.6])
@pytest.mark.parametrize("others", ["all", "half"])
def test_weights_that_round_to_one_are_charged_for_their_distance(dtype: torch.dtype, part: float, others: str) -> None:
    """Scores just below the largest all round up to 1: a kernel that sums rounded weights would be accused."""
    scores = torch.full((400,), -part * UNIT[dtype], dtype=torch.float32)
    scores[0 if others == "all" else slice(None, None, 2)] = 0.0
    exact = scores.double().logsumexp(0)
    got = rounded_sum_lse(scores, dtype)
    ratio = float(error_ratio(got, exact, bound_of(scores, dtype, Numerics()).lse[0]))
    assert ratio < 1
    if part in (0.4, 0.49) and others == "all":
        assert ratio > 0.45  # what is charged is what it costs


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("logit_exponent", [-6, 0])
def test_one_of_2000_equal_tokens_is_missed_by_the_lse(dtype: str, logit_exponent: int) -> None:
    """A dropped token would drown among equal weights, each charged for a rounding that none of them has."""
    case = DenseDecodeCase(
        num_q_heads=2,
        num_kv_heads=2,
        head_size=64,
        scale=0.125,
        dtype=dtype,  # type: ignore[arg-type]  # any str
        seq_lens=(2000,),
        values=Values(keys="equal", values="normal", logit_exponent=logit_exponent, seed=1),
    )
    values = attention_values(case)
    k, v = (part.double() for part in values.sequence(0))
    types = {"in_dtype": getattr(torch, dtype), "out_dtype": getattr(torch, dtype)}
    bound = attention_bound(values.q[0].double(), k, v, 0.125, **types, numerics=Numerics(), num_partials=2)
    assert bool((math.log(2000 / 1999) > bound.lse).all())
    lse = rounded_sum_lse((0.125 * values.q[0, 0].float() @ k[:, 0].float().T), types["in_dtype"])
    exact = (0.125 * values.q[0, 0].double() @ k[:, 0].T).logsumexp(0)
    assert float((lse - exact).abs() / bound.lse[0]) < 0.5


ALL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
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


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
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


Computed = Callable[[Tensor, Tensor], Tensor]
Carried = Callable[[Rounded, Rounded], Rounded]

OPERATIONS: dict[str, tuple[Computed, Carried]] = {
    "sum": (lambda x, y: x + y, lambda x, y: x + y),
    "difference": (lambda x, y: x - y, lambda x, y: x - y),
    "product": (lambda x, y: x * y, lambda x, y: x * y),
    "quotient": (lambda x, y: x / y, lambda x, y: x / y),
    "exponential": (lambda x, _: x.exp(), lambda x, _: x.exp()),
    "logarithm": (lambda x, y: (1 + y.exp()).log(), lambda _, y: (exactly(1.0) + y.exp()).log()),
    "root": (lambda x, y: (x * x).rsqrt(), lambda x, _: (x * x).rsqrt()),
    "dot": (lambda x, y: (x * y).sum(-1), lambda x, y: x.dot(y)),
    "chain": (
        lambda x, y: ((x * y).sum(-1).exp() * (x.exp() / (1 + y.exp())).sum(-1)).float(),
        lambda x, y: (x.dot(y).exp() * (x.exp() / (exactly(1.0) + y.exp())).sum(-1)).stored("float32"),
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_float32_gives_is_within_the_bound_and_not_far(name: str) -> None:
    """A right kernel would be told to be wrong, or a wrong one not."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(200, 64, generator=generator).clamp(-2, 2) + 3 * (name == "quotient") for _ in range(2))
    computed, carried = OPERATIONS[name]
    found = carried(exactly(x), exactly(y))
    assert torch.allclose(found.value, computed(x.double(), y.double()).double(), rtol=1e-3)
    error = (computed(x, y).double() - found.value).abs()
    assert bool((error <= found.error).all())
    assert float((error / found.error).max()) > 0.005
    assert float((found.error / found.value.abs().clamp(min=1.0)).max()) < 1e-3


def test_errors_of_operands_are_carried_on() -> None:
    """What a first step got wrong would be forgotten by the next."""
    x, off = torch.tensor([0.7, 3.0], dtype=torch.float64), torch.tensor([0.01, 0.02], dtype=torch.float64)
    number = Rounded(x, off)
    for carried, exact in (
        (number * number, lambda x: x * x),
        (number - exactly(1.0), lambda x: x - 1),
        (exactly(1.0) / number, lambda x: 1 / x),
        (number.exp(), torch.exp),
        (number.log(), torch.log),
        (number.rsqrt(), torch.rsqrt),
        (number.dot(exactly(2.0)), lambda x: (2 * x).sum()),
    ):
        for sign in (-1, 1):
            assert bool(((exact(x + sign * off) - exact(x)).abs() <= carried.error).all())


def test_a_number_that_may_be_zero_has_no_bound() -> None:
    """A quotient without a bound would be compared with one."""
    near = Rounded(torch.tensor(1e-3, dtype=torch.float64), torch.tensor(2e-3, dtype=torch.float64))
    with pytest.raises(ValueError, match="quotient"):
        exactly(1.0) / near
    with pytest.raises(ValueError, match="logarithm"):
        near.log()
    nothing = exactly(0.0).log()
    assert (float(nothing.value), float(nothing.error)) == (-torch.inf, 0.0)
