"""Memory on one side of a kernel: what it is filled with, and writes beside it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnfuzz.memory.arena import Arena, violations
from attnfuzz.memory.patterns import POISON_BYTES, Fill, bits, holds_prefill, poison_value, prefill_
from attnfuzz.problems.recipes import STRIDE_KINDS, StrideKind


def arena(poison: Fill = "nan", *, capacity: int = 1 << 14) -> Arena:
    return Arena("cpu", poison=poison, prefill=poison, capacity=capacity)


def neighbour(tensor: Tensor, offset: int) -> Tensor:
    """The memory ``offset`` elements after the tensor's first one."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset)


@pytest.mark.parametrize("strides", STRIDE_KINDS)
@pytest.mark.parametrize("poison", ["nan", "finite"])
def test_inputs_are_poison_and_outputs_prefilled(strides: StrideKind, poison: Fill) -> None:
    """Dead elements of an input would hold harmless numbers, or an output what the last run left."""
    memory = arena(poison)
    live = memory.tensor("q", (2, 3, 4), torch.float16, strides=strides, role="input")
    out = memory.tensor("out", (2, 3, 4), torch.float32, strides=strides, role="output")
    expected = torch.tensor(poison_value(torch.float16, poison), dtype=torch.float16)
    assert torch.equal(live.nan_to_num(7.0), expected.nan_to_num(7.0).expand(2, 3, 4))
    assert holds_prefill(out, poison).all()


@pytest.mark.parametrize("strides", STRIDE_KINDS)
def test_stride_recipes_shape_the_memory(strides: StrideKind) -> None:
    """A case's stride recipe would not reach the kernel."""
    tensor = arena().tensor("q", (2, 3, 4), torch.float16, strides=strides, role="input")
    found = {
        "contiguous": tensor.is_contiguous() and tensor.data_ptr() % 16 == 0,
        "outer_gap": tensor.stride(0) > 12 and tensor.stride()[1:] == (4, 1) and (tensor.stride(0) - 12) % 8 == 0,
        "padded_rows": tensor.stride(1) > 4 and tensor.stride(2) == 1,
        "transposed": tensor.stride(0) < tensor.stride(1),
        "offset": tensor.is_contiguous() and tensor.data_ptr() % 16 == 2,
        "every_other": tensor.stride(2) == 2,
    }
    assert found[strides]


@pytest.mark.parametrize("capacity", [1 << 8, 1 << 14])
@pytest.mark.parametrize(
    ("offset", "where", "distance"), [(-1, "before", 1), (-20, "before", 20), (12, "after", 1), (40, "after", 29)]
)
def test_write_beside_an_output_is_located(offset: int, where: str, distance: int, capacity: int) -> None:
    """A stray write would be attributed to another tensor or place."""
    memory = arena(capacity=capacity)
    memory.tensor("q", (5,), torch.float32, role="input").fill_(1)
    out = memory.tensor("out", (3, 4), torch.float32, role="output")
    memory.tensor("k", (5,), torch.float32, role="input").fill_(1)
    memory.seal()
    neighbour(out, offset).fill_(3)
    assert memory.damage()
    (found,) = violations(memory)
    assert (found.name, found.where, found.distance, found.elements) == ("out", where, distance, 1)


def test_modified_input_is_located() -> None:
    """A modified input would be noticed, but not where."""
    memory = arena()
    q = memory.tensor("q", (2, 3, 4), torch.bfloat16, strides="every_other", role="input")
    q.fill_(1)
    memory.seal()
    q[1, 2, 0] = 2
    q[1, 2, 3] = 2
    (found,) = violations(memory)
    assert (found.where, found.index, found.elements, found.dtype) == ("inside", (1, 2, 0), 2, "bfloat16")


def test_writing_the_value_that_is_there_is_no_damage() -> None:
    """A write that changes nothing would be reported with nothing to show."""
    memory = arena("finite")
    out = memory.tensor("out", (4,), torch.float32, role="output")
    memory.seal()
    neighbour(out, 4).fill_(poison_value(torch.float32, "finite"))
    assert not memory.damage()


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
