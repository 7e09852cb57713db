"""Writes outside outputs and workspaces, and into inputs, planted one at a time."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from attnfuzz.problems.cases import Case, DenseDecodeCase, PagedDecodeCase


def poke(tensor: Tensor, element: int, count: int = 1) -> None:
    """Write ``count`` elements, the first of them ``element`` elements after the tensor's first one in memory."""
    tensor.as_strided((count,), (1,), tensor.storage_offset() + element).fill_(7)


@pytest.mark.parametrize(
    ("element", "kind", "words"),
    [
        (96, "write after out", "wrote 1 element after out .*the nearest is 1 element past its end"),
        (130, "write after out", "the nearest is 35 elements past its end"),
        (-1, "write before out", "wrote 1 element before out .*the nearest is 1 element before its start"),
    ],
)
def test_write_beside_an_offered_output(
    element: int, kind: str, words: str, plant: Any, dense: Case, failure_of: Any
) -> None:
    """An out-of-bounds write next to the output would go unnoticed, or be blamed on another tensor."""

    def write_beside(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        poke(inputs.out, element)
        return out, lse

    failure = failure_of(plant(after=write_beside), dense)
    assert (failure.oracle, failure.kind) == ("red_zone", kind)
    assert re.search(words, failure.message)


def test_write_beyond_a_workspace(plant: Any, dense: Case, failure_of: Any) -> None:
    """A kernel could overrun a buffer of its own."""

    def overrun(inputs: Any) -> None:
        poke(torch.empty(3, 5), 15, count=2)

    failure = failure_of(plant(before=overrun), dense)
    assert (failure.oracle, failure.kind) == ("red_zone", "write after workspace")
    assert "wrote 2 elements after workspace (float32 [3, 5])" in failure.message


def test_write_beyond_a_returned_buffer_names_the_result(plant: Any, dense: Case, failure_of: Any) -> None:
    """An overrun of an output that the kernel allocated would be reported as that of an unnamed workspace."""

    def overrun(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        poke(lse, 12)
        return out, lse

    failure = failure_of(plant(after=overrun), dense)
    assert (failure.oracle, failure.kind) == ("red_zone", "write after lse")


def test_write_into_the_gaps_of_a_strided_output(plant: Any, dense: Case, failure_of: Any) -> None:
    """A kernel that takes an output for contiguous could destroy what lies between its rows."""
    case = msgspec.structs.replace(dense, strides={"out": "padded_rows"})

    def write_flat(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        poke(inputs.out, 8)
        return out, lse

    failure = failure_of(plant(after=write_flat), case)
    assert (failure.oracle, failure.kind) == ("red_zone", "write between out")


@pytest.mark.parametrize(
    ("strides", "kind", "words"),
    [
        (
            {"out": "outer_gap"},
            "write between out",
            "out is written with the strides of q or of a contiguous tensor, which are the same here",
        ),
        ({"q": "outer_gap"}, "write after out", "out is written with the strides of q"),
        ({"q": "padded_rows", "out": "outer_gap"}, "write after out", "out is written with the strides of q"),
    ],
)
def test_a_result_in_the_places_of_another_tensors_elements(
    strides: Any, kind: str, words: str, plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """One bug would be told twice, or what takes all tensors for contiguous be said to take q's strides."""
    case = msgspec.structs.replace(dense, seq_lens=(3, 4), strides=strides)

    def as_q_lies(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        inputs.out.as_strided(out.shape, inputs.q.stride()).copy_(out)
        return inputs.out, lse

    failure = failure_of(plant(after=as_q_lies), case)
    assert (failure.oracle, failure.kind, failure.cause) == ("red_zone", kind, "other_strides")
    assert failure.details[0] == words


def test_such_a_result_is_named_where_it_reaches_the_next_tensor(
    plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """The bug would be another one where most stray writes lie before the tensor that follows."""
    sizes = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 128, "dtype": "float32", "seq_lens": (1, 1, 1)}
    case = msgspec.structs.replace(dense, strides={"q": "outer_gap"}, **sizes)

    def as_q_lies(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        first, step = inputs.out.storage_offset(), inputs.q.stride(0)
        for i in range(len(out)):
            room = inputs.out.untyped_storage().nbytes() // out.itemsize - (first + i * step)
            row = out[i].flatten()[: max(room, 0)]  # what torch lets a test write; a kernel would go on
            inputs.out.as_strided(row.shape, (1,), first + i * step).copy_(row)
        return inputs.out, lse

    failure = failure_of(plant(after=as_q_lies), case)
    assert (failure.kind, failure.cause) == ("write before lse", "other_strides")
    assert failure.details[0] == "out is written with the strides of q"


@pytest.mark.parametrize("name", ["q", "k", "seq_lens"])
def test_modified_input(name: str, plant: Any, dense: DenseDecodeCase, failure_of: Any) -> None:
    """A kernel could change its inputs, which the next layer of a model still needs."""

    def modify(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        getattr(inputs, name).view(-1)[1].add_(3)
        return out, lse

    failure = failure_of(plant(after=modify), dense)
    assert (failure.oracle, failure.kind) == ("red_zone", f"{name} modified")
    assert failure.message.startswith(f"input {name} ")


def test_modified_dead_memory_is_a_modified_input(plant: Any, paged: PagedDecodeCase, failure_of: Any) -> None:
    """A write to a page that no sequence owns yet would go unnoticed."""

    def modify(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        inputs.k_cache[inputs.block_table[0, 0], 7] = 0
        return out, lse

    failure = failure_of(plant("paged_decode", after=modify), paged)
    assert (failure.oracle, failure.kind) == ("red_zone", "k_cache modified")


def test_further_writes_are_listed(plant: Any, dense: Case, failure_of: Any) -> None:
    """Only one of several stray writes would be shown."""

    def write(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        poke(inputs.out, 96)
        inputs.q[0, 0, 0] += 1
        return out, lse

    failure = failure_of(plant(after=write), dense)
    assert failure.kind == "write after out"
    assert [detail for detail in failure.details if detail.startswith("also input q ")]
