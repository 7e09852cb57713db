"""What the bound of attention promises: its shapes, its errors, what it takes for equal, and how large ties make it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import attnfuzz.numerics.bounds as attention_module
from attnfuzz.numerics import Bound, attention_bound, error_ratio
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
