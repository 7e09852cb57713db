"""Rounding units against the rounding that torch does."""

from __future__ import annotations

import pytest
import torch

from attnfuzz.numerics import half_smallest_subnormal, unit_roundoff
from attnfuzz.numerics.arithmetic import accumulation_roundoff, gamma
from attnfuzz.problems.declared_numerics import Numerics

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unit_roundoff_is_half_the_machine_epsilon(dtype: torch.dtype) -> None:
    """Half the distance from 1 to the next number is the relative error of rounding to nearest."""
    assert unit_roundoff(dtype) == torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_smallest_subnormal_is_where_rounding_to_zero_ends(dtype: torch.dtype) -> None:
    """A number just above half the smallest subnormal must round up to it, and the half itself to zero."""
    half = half_smallest_subnormal(dtype)
    assert torch.tensor(half, dtype=torch.float64).to(dtype).item() == 0
    assert torch.tensor(half * 1.01, dtype=torch.float64).to(dtype).item() == 2 * half


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    """A dtype the model does not know must not get another one's error."""
    with pytest.raises(ValueError, match=r"must be one of torch.float16, torch.bfloat16, torch.float32"):
        unit_roundoff(dtype)
    with pytest.raises(ValueError, match=r"must be one of torch.float16, torch.bfloat16, torch.float32"):
        half_smallest_subnormal(dtype)


def test_tensor_cores_truncate() -> None:
    """Accumulation on tensor cores loses up to one ulp for each term, twice what rounding does."""
    assert accumulation_roundoff(Numerics(matmul="ieee")) == 2.0**-24
    assert accumulation_roundoff(Numerics(matmul="tensor_core")) == 2.0**-23
    assert accumulation_roundoff(Numerics(matmul="tf32")) == 2.0**-23


def test_gamma_covers_a_product_of_roundings() -> None:
    """n roundings in the same direction compound; gamma_n must not be less than that, nor much more."""
    n, u = 1000, 2.0**-11
    compounded = (1 + u) ** n - 1
    assert compounded < gamma(n, u) < 2 * compounded


def test_gamma_refuses_sums_without_information() -> None:
    """Beyond n u = 1/2 the formula turns negative and would pass anything as wrong."""
    with pytest.raises(ValueError, match=r"must stay below 0\.5"):
        gamma(2**23, 2.0**-24)
