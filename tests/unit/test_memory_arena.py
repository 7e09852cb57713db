"""Arenas: what they hand out, and that every stray write is noticed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnfuzz.memory.arena import Arena, violations
from attnfuzz.memory.patterns import Fill, holds_prefill, poison_value
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


def test_write_between_two_outputs_belongs_to_the_nearer() -> None:
    """Of two outputs side by side the wrong one would be blamed."""
    memory = arena()
    out = memory.tensor("out", (8,), torch.float32, role="output")
    lse = memory.tensor("lse", (8,), torch.float32, role="output")
    memory.seal()
    neighbour(out, 9).fill_(0)
    neighbour(lse, -2).fill_(0)
    assert [(found.name, found.where, found.distance) for found in violations(memory)] == [
        ("out", "after", 2),
        ("lse", "before", 2),
    ]


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


def test_large_tensor_gets_a_chunk_of_its_own() -> None:
    """A tensor larger than the arena's capacity would fail, or overlap its neighbours."""
    memory = arena(capacity=1 << 10)
    large = memory.tensor("k", (1 << 12,), torch.float32, role="input")
    large.fill_(1)
    memory.seal()
    assert memory.nbytes > large.nbytes
    neighbour(large, 1 << 12).fill_(0)
    (found,) = violations(memory)
    assert (found.name, found.where, found.distance) == ("k", "after", 1)
