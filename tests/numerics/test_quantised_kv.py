"""The bound with an 8-bit cache from both sides: wherever a right kernel multiplies its scales in, and no wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.numerics import attention_bound, error_ratio
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.quantised_kv import KvDtype, KvScales, QuantisedKv, smallest_magnitudes

F32 = torch.float32
STRICT = Numerics(probabilities="float32", partials="float32", matmul="ieee")
SCALE = 0.125
Result = tuple[Tensor, Tensor]
K_SCALE, V_SCALE = torch.tensor(0.3712345), torch.tensor(5.4321987)


def drawn(seed: int, seq_len: int, dtype: KvDtype = "float8_e4m3fn", size: float = 1.0) -> tuple[Tensor, ...]:
    """q, exact in bfloat16, and what the cache holds of K and V; `size`: of the keys."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((4, 64), (seq_len, 2, 64), (seq_len, 2, 64)))
    return q.bfloat16().float(), (k * size).to(getattr(torch, dtype)).float(), v.to(getattr(torch, dtype)).float()


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | Tensor) -> Result:
    k, v = (part.repeat_interleave(2, 1).transpose(0, 1) for part in (k, v))
    scores = (q[:, None] * k).sum(-1) * scale
    return (scores.softmax(-1)[..., None] * v).sum(1), scores.logsumexp(-1)


def ratio(got: Result, given: tuple[Tensor, ...], dtype: KvDtype = "float8_e4m3fn", **more: Any) -> float:
    q, k, v = (part.double() for part in given)
    k, v = k * K_SCALE.double(), v * V_SCALE.double()
    smallest = smallest_magnitudes(QuantisedKv(dtype=dtype), KvScales((float(K_SCALE),), (float(V_SCALE),)))
    keywords: dict[str, Any] = {"in_dtype": torch.bfloat16, "out_dtype": F32, "numerics": STRICT} | more
    bound = attention_bound(q, k, v, SCALE, smallest_kv=smallest, **keywords)
    parts = zip(got, attend(q, k, v, SCALE), (bound.out, bound.lse), strict=True)
    return max(error_ratio(a.double(), b, c).max().item() for a, b, c in parts)


def on_keys_and_values(q: Tensor, k: Tensor, v: Tensor) -> Result:
    return attend(q, k * K_SCALE, v * V_SCALE, SCALE)


def on_scores_and_result(q: Tensor, k: Tensor, v: Tensor) -> Result:
    out, lse = attend(q, k, v, K_SCALE * SCALE)
    return out * V_SCALE, lse


def on_queries(q: Tensor, k: Tensor, v: Tensor) -> Result:
    out, lse = attend(q * (K_SCALE * SCALE), k, v, 1.0)
    return out * V_SCALE, lse


RIGHT: list[Callable[..., Result]] = [on_keys_and_values, on_scores_and_result, on_queries]


@pytest.mark.parametrize("write", RIGHT)
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_scales_may_be_multiplied_in_anywhere(write: Callable[..., Result], size: float) -> None:
    """A right kernel would be blamed for where it applies its scales."""
    worst = 0.0
    for seed, seq_len in enumerate((1, 17, 97, 512)):
        given = drawn(seed, seq_len, size=size)
        worst = max(worst, ratio(write(*given), given))
    assert 0.002 < worst < 1


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("input_dtype", [torch.float16, torch.bfloat16])
def test_rounding_what_the_cache_stands_for_must_be_declared(dtype: KvDtype, input_dtype: torch.dtype) -> None:
    """vLLM's way of writing it would be called a bug, or a kernel lose digits unseen."""
    declared = Numerics(probabilities="float32", partials="float32", matmul="ieee", dequantised="input")
    for size in (1.0, 2.0**-12):
        given = drawn(5, 5, dtype, size=size)
        q, k, v = given
        k, v = ((part * scale).to(input_dtype).float() for part, scale in ((k, K_SCALE), (v, V_SCALE)))
        got = attend(q, k, v, SCALE)
        assert ratio(got, given, dtype, in_dtype=input_dtype, numerics=declared) < 1
        assert ratio(got, given, dtype, in_dtype=input_dtype) > 10


SHORT_QUERY = Numerics(probabilities="float32", partials="float32", matmul="ieee", query="float8_e4m3fn")


@pytest.mark.parametrize(("number", "by_two_bits"), [(1.0625, 1.125), (2.0**-10, 2.0**-8 + 2.0**-10), (0.5, 0.5625)])
def test_what_8_bits_take_of_a_query_is_the_bound(number: float, by_two_bits: float) -> None:
    """A number between two of the format would be accused, or one that loses a bit more be excused."""
    _, k, v = drawn(3, 17)
    q = torch.zeros(4, 64).index_fill(1, torch.tensor([7]), number)
    rounded = q.to(torch.float8_e4m3fn).float()
    assert ratio(on_scores_and_result(rounded, k, v), (q, k, v), numerics=SHORT_QUERY) < 1
    more = q.index_fill(1, torch.tensor([7]), by_two_bits)
    fewer = more.to(torch.float8_e5m2).float() if number > 0.01 else torch.zeros_like(q)
    assert ratio(on_scores_and_result(fewer, k, v), (more, k, v), numerics=SHORT_QUERY) > 1


def test_nothing_is_promised_of_a_query_beyond_8_bits() -> None:
    """A kernel would be accused of what its format cannot hold."""
    q, k, v = (part.double() for part in drawn(3, 17))
    q[1, 5] = 449.0
    bound = attention_bound(q, k, v, SCALE, in_dtype=torch.bfloat16, out_dtype=F32, numerics=SHORT_QUERY)
    assert bound.lse.isinf().tolist() == [False, True, False, False]
    assert bound.out.isinf().all(-1).tolist() == [False, True, False, False]


WRONG: dict[str, Callable[..., Result]] = {
    "scales left out": lambda q, k, v: attend(q, k, v, SCALE),
    "scale of K left out": lambda q, k, v: attend(q, k, v * V_SCALE, SCALE),
    "scale of V left out": lambda q, k, v: attend(q, k * K_SCALE, v, SCALE),
    "swapped": lambda q, k, v: attend(q, k * V_SCALE, v * K_SCALE, SCALE),
    "scales in float16": lambda q, k, v: attend(q, k * K_SCALE.half(), v * V_SCALE.half(), SCALE),
    "K's scale twice": lambda q, k, v: attend(q, k * K_SCALE**2, v * V_SCALE, SCALE),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_with_scales_are_found(name: str) -> None:
    """The bound would excuse what it exists to find."""
    given = drawn(7, 5)
    assert ratio(WRONG[name](*given), given) > 10
