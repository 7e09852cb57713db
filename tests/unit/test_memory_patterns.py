"""The bit patterns of memory that must not be read, or was not written."""

from __future__ import annotations

import math

import pytest
import torch

from attnfuzz.memory.patterns import POISON_BYTES, bits, holds_prefill, poison_value, prefill_

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OTHERS = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn, torch.complex64]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_poison_is_nan_and_finite_poison_small(dtype: torch.dtype) -> None:
    """Dead memory would hold a number in the run that expects NaN, or overflow in the other one."""
    assert math.isnan(poison_value(dtype, "nan"))
    assert 0 < poison_value(dtype, "finite") < 1.1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_prefill_differs_from_poison_and_from_computed_nan(dtype: torch.dtype) -> None:
    """An element that a kernel computed, or copied from dead memory, would be taken for one it never wrote."""
    tensor = torch.empty(3, dtype=dtype)
    prefill_(tensor, "nan")
    assert tensor.isnan().all()
    poison = torch.full((dtype.itemsize,), POISON_BYTES["nan"], dtype=torch.uint8).view(dtype)
    computed = torch.tensor([0.0], dtype=dtype) / 0
    assert not holds_prefill(torch.cat((poison, computed)), "nan").any()


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=str)
def test_two_prefills_have_different_bits(dtype: torch.dtype) -> None:
    """Nothing would change between two runs, so that an unwritten element could not be told."""
    one, other = torch.empty(4, dtype=dtype), torch.empty(4, dtype=dtype)
    prefill_(one, "nan")
    prefill_(other, "finite")
    assert (bits(one) != bits(other)).all()
    assert holds_prefill(one, "nan").all()
    assert holds_prefill(other, "finite").all()
    assert not holds_prefill(other, "nan").any()


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS[1:]], ids=str)
def test_a_third_prefill_differs_from_both(dtype: torch.dtype) -> None:
    """A result that outweighs two patterns would outweigh the third, and count as never written."""
    third, finite = torch.empty(4, dtype=dtype), torch.empty(4, dtype=dtype)
    prefill_(third, "low")
    prefill_(finite, "finite")
    assert holds_prefill(third, "low").all()
    assert not (holds_prefill(third, "finite") | holds_prefill(third, "nan") | holds_prefill(finite, "low")).any()
    if dtype in FLOATS:
        assert bool((third < -8000).all())


def test_bits_tell_nans_and_zeros_apart() -> None:
    """NaN would never equal itself, and -0.0 would equal 0.0, in a comparison of bits."""
    one = torch.tensor([math.nan, 0.0, 1.0])
    assert (bits(one) == bits(one.clone())).all()
    assert (bits(one) != bits(torch.tensor([1.0, -0.0, 1.0]))).tolist() == [True, True, False]


def test_bits_of_the_widest_dtype_are_refused() -> None:
    """A dtype without an integer of its size would fail somewhere inside torch."""
    with pytest.raises(ValueError, match="16 bytes per element; at most 8"):
        bits(torch.zeros(1, dtype=torch.complex128))
