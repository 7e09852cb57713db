"""Results that are not linear in V, within their bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.problems.declared_numerics import FixedTolerance
from attnfuzz.problems.recipes import Values
from tests.oracles.relations.objections import objection

NAMES: tuple[OracleName, ...] = ("value_affinity",)
SHORT = ("float16", "bfloat16", "float32")
FLOAT_PARTIALS = attnfuzz.Numerics(partials="float32")


def test_an_epsilon_that_the_bound_lets_through(plant: Any, dense: DenseDecodeCase) -> None:
    """A constant added to every result would stay below every tolerance, and count where values are small."""
    failure = objection("value_affinity", plant(average=lambda weights, v: weights @ v + 1e-6), dense)
    assert failure is not None
    assert failure.kind == "bits"
    assert failure.message.startswith("out[")
    assert "with V times -1: the bits must be equal" in failure.message


def test_a_clamp_that_only_larger_values_reach(plant: Any, dense: DenseDecodeCase) -> None:
    """Values past a kernel's constant would be cut off, and no recipe draws them."""
    kernel = plant(average=lambda weights, v: (weights @ v).clamp(-4096, 4096))
    failure = objection("value_affinity", kernel, dense)
    assert failure is not None
    assert "but -4096.0 with V times -2**35" in failure.message


def test_a_sum_that_overflows_in_16_bits(plant: Any, dense: DenseDecodeCase) -> None:
    """An accumulator in float16 would be told as a bug of its own beside the wrong numbers that it gives."""
    numerics = attnfuzz.Numerics(partials="float32")
    kernel = plant(average=lambda weights, v: (8 * weights @ v).half().to(v.dtype) / 8, numerics=numerics)
    failure = objection("value_affinity", kernel, msgspec.structs.replace(dense, dtype="float16"))
    assert failure is not None
    assert failure.maybe == ("sums_rounded",)
    assert "overflows at 65504" in failure.message


def test_an_lse_that_depends_on_v(plant: Any, dense: DenseDecodeCase) -> None:
    """An LSE that takes a little of a value would be right within its bound."""

    def mix(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        return out, lse + (out[..., 0] > 0) * 2**-21

    failure = objection("value_affinity", plant(after=mix), dense)
    assert failure is not None
    assert failure.kind == "bits"
    assert failure.message.startswith("lse[")


def test_a_loose_tolerance_hides_nothing(plant: Any, dense: DenseDecodeCase) -> None:
    """Users who must allow for 1e-1 would learn nothing of an error that large."""
    kernel = plant(average=lambda weights, v: weights @ v + 0.01)
    loose = FixedTolerance(atol=0.1, rtol=0.0)
    failure = judge(kernel, dense, device="cpu", tolerance=loose, relations=NAMES).failure
    assert failure is not None
    assert failure.oracle == "value_affinity"


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("values", ["positions", "integers", "normal", "large", "small"])
@pytest.mark.parametrize("fixture", ["dense", "split", "states"])
@pytest.mark.by_day("dense-integers-float16", "split-normal-bfloat16", "states-large-float32")
def test_correct_kernels_do_not_notice(
    fixture: str, values: Any, dtype: Any, plant: Any, request: pytest.FixtureRequest
) -> None:
    """A false alarm: something left the range of a dtype on the way, or a zero changed its sign."""
    case: Case = msgspec.structs.replace(request.getfixturevalue(fixture), dtype=dtype)
    if fixture != "states":
        recipe = Values(keys="normal", values=values, logit_exponent=2, seed=5)
        case = msgspec.structs.replace(case, values=recipe)
    for numerics in (attnfuzz.Numerics(), FLOAT_PARTIALS):
        kernel = plant(case.problem, numerics=numerics)
        assert judge(kernel, case, device="cpu", relations=NAMES).failure is None


def test_a_product_too_small_for_float32_may_decide_how_a_sum_is_rounded(plant: Any, dense: DenseDecodeCase) -> None:
    """A right kernel would be accused of one bit, where a weight of 1e-45 lies beside two that meet half-way."""

    def average(weights: Tensor, v: Tensor) -> Tensor:
        products = (weights[..., None] * v).abs()
        is_lost = ((products > 0) & (products < 2.0**-126)).any()
        return weights @ v * (1 + 2**-23 * is_lost)

    far_apart = Values(keys="negative", values="normal", logit_exponent=2)
    case = msgspec.structs.replace(dense, dtype="float32", values=far_apart)
    kernel = plant(average=average)
    assert objection("value_affinity", kernel, case) is None
    assert objection("value_affinity", plant(average=lambda weights, v: (weights @ v).clamp(-4096)), dense) is not None


def test_partial_results_in_float16_are_asked_about_the_sign_alone(plant: Any, dense: DenseDecodeCase) -> None:
    """A split's result below 2**-14 has fewer digits before V is scaled than after: a false alarm."""
    case = msgspec.structs.replace(dense, dtype="float16", values=Values(keys="normal", values="normal", seed=3))
    scales: list[float] = []
    for numerics in (attnfuzz.Numerics(), FLOAT_PARTIALS):
        kernel = plant(numerics=numerics, before=lambda inputs: scales.append(float(inputs.v[0, 0].abs().max())))
        judge(kernel, case, device="cpu", relations=NAMES)
    assert scales[2] == scales[0]
    assert scales[5] > 1000 * scales[3]


def test_results_that_were_rounded_up_to_the_smallest_normal_number(plant: Any, dense: DenseDecodeCase) -> None:
    """Just below 2**-14 float16 has a digit less than its scaled copy: a right kernel was accused of its last bit."""
    case = msgspec.structs.replace(dense, dtype="float16", values=Values(keys="normal", values="integers", seed=3))
    factors: list[Tensor] = []

    def just_below(weights: Tensor, v: Tensor) -> Tensor:
        average = weights @ v
        if len(factors) < num_rows:  # those of the first run; linear in V from then on
            factors.append(2**-14 * (1 - 0.75 * 2**-11) / average)
        calls.append(1)
        return average * factors[(len(calls) - 1) % num_rows]

    calls: list[int] = []
    num_rows = sum(length > 0 for length in case.seq_lens) * case.num_q_heads
    kernel = plant(numerics=FLOAT_PARTIALS, average=just_below)
    assert judge(kernel, case, device="cpu", oracles=NAMES, relations=NAMES).failure is None
    assert len(calls) >= 2 * num_rows


def test_values_that_are_all_zero(plant: Any, dense: DenseDecodeCase) -> None:
    """The power of two that zeros could be scaled by has no logarithm."""
    empty = msgspec.structs.replace(dense, seq_lens=(0, 1), values=Values(values="integers"))
    kernel = plant(average=lambda weights, v: torch.zeros_like(v[0]))
    assert judge(kernel, empty, device="cpu", oracles=NAMES).failure is None


def test_results_in_buffers_that_the_kernel_keeps(plant: Any, dense: DenseDecodeCase) -> None:
    """The first result would be compared when a later call has overwritten it, and a right kernel accused."""
    kept: dict[Any, Tensor] = {}

    def store(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        return tuple(
            kept.setdefault((name, part.shape), torch.empty_like(part)).copy_(part)
            for name, part in (("o", out), ("l", lse))
        )

    assert objection("value_affinity", plant(after=store), dense) is None
