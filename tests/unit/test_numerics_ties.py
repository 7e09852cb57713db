"""Weights of equal and nearly equal scores in 16 bits: what rounding them costs a sum of rounded weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnfuzz.numerics import Bound, attention_bound, error_ratio
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.recipes import Values
from attnfuzz.values import attention_values

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
