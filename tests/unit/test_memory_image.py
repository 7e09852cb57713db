"""Memory of many cases: byte for byte what an arena of each case holds, and stray writes located as there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnfuzz.memory.arena import Arena
from attnfuzz.memory.fetch import Fetch
from attnfuzz.memory.image import RUNS, Image, plan_of
from attnfuzz.memory.patterns import bits, holds_prefill
from attnfuzz.memory.violations import violations
from attnfuzz.problems.cases import PROBLEMS, Case, DenseDecodeCase, Problem
from attnfuzz.problems.registry import problem_of
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies.cases import cases

CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=8, seq_lens=(3, 0), scale=1.0, dtype="float32")


def filled(batch: list[Case]) -> Image:
    image = Image([plan_of(case) for case in batch], "cpu")
    problem = problem_of(batch[0])
    for i, contents in enumerate(problem.contents(batch, "cpu", Supports())):
        problem.write(batch[i], image.tensors(i), contents.values, contents.placement)
    image.send()
    return image


def assert_same(one: Tensor, other: Tensor) -> None:
    assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("problem", PROBLEMS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_kernels_get_what_they_get_alone(problem: Problem, data: st.DataObject) -> None:
    """In a batch a kernel would be given other inputs than alone, and failures would not be seen again."""
    batch = data.draw(st.lists(cases(problem), min_size=1, max_size=5))
    image = filled(batch)
    for i, case in enumerate(batch):
        for run, fill in enumerate(RUNS):
            arena = Arena("cpu", poison=fill, prefill=fill)
            problem_of(case).build(case, arena, Supports())
            found = {name: tensor[run] for name, tensor in image.on_device(i).items()}
            assert list(found) == list(tensor_specs(case))
            for region in arena.regions:
                assert_same(found[region.name], region.tensor)


def test_outputs_are_prefilled_and_nothing_is_damaged() -> None:
    """A kernel that writes nothing would be accused of writing, or not found out."""
    image = filled([CASE, CASE])
    for i in range(2):
        for run, fill in enumerate(RUNS):
            assert holds_prefill(image.on_device(i)["out"][run], fill).all()
            assert not image.arena(i, run, Fetch()).damage()


def test_stray_write_is_located() -> None:
    """A write past an output would be blamed on another case, run or tensor."""
    image = filled([CASE, CASE, CASE])
    out = image.on_device(1)["out"][1]
    out.as_strided((1,), (1,), out.storage_offset() + out.numel() + 2).fill_(5.0)
    damaged = {(i, run): bool(image.arena(i, run, Fetch()).damage()) for i in range(3) for run in range(2)}
    assert [place for place, mark in damaged.items() if mark] == [(1, 1)]
    assert image.damage(Fetch()) == [(False, False), (False, True), (False, False)]
    (found,) = violations(image.arena(1, 1, Fetch()))
    assert (found.name, found.where, found.distance, found.elements) == ("out", "after", 3, 1)


def test_modified_input_is_located() -> None:
    """A kernel that writes to its inputs would pass."""
    image = filled([CASE])
    image.on_device(0)["q"][0, 1, 0, 3] = 99.0
    (found,) = violations(image.arena(0, 0, Fetch()))
    assert (found.name, found.where, found.index) == ("q", "inside", (1, 0, 3))


def test_results_are_no_damage() -> None:
    """A correct kernel's results would be taken for stray writes."""
    image = filled([CASE, CASE])
    for name in ("out", "lse"):
        image.on_device(0)[name].fill_(1.0)
    assert not any(image.arena(i, run, Fetch()).damage() for i in range(2) for run in range(2))
    assert image.damage(Fetch()) == [(False, False)] * 2


def test_size_is_known_before() -> None:
    """A batch would be cut by another measure than the memory it takes."""
    image = Image([plan_of(CASE)] * 2, "cpu")
    tensors: dict[str, Any] = image.on_device(0)
    assert tensors["q"].untyped_storage().nbytes() == 2 * plan_of(CASE).nbytes
