"""Memory of many cases: byte for byte what an arena of each case holds, and stray writes located as there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnfuzz.inputs.registry import problem_of
from attnfuzz.memory import image as module
from attnfuzz.memory.arena import Arena, violations
from attnfuzz.memory.image import RUNS, Fetch, Image, plan_of
from attnfuzz.memory.patterns import bits, holds_prefill
from attnfuzz.problems.cases import PROBLEMS, Case, DenseDecodeCase, Problem
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.problems.supports import Dtype, Supports
from attnfuzz.strategies.cases import cases

CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=8, seq_lens=(3, 0), scale=1.0, dtype="float32")


def filled(batch: list[Case], *, derive: bool = False) -> Image:
    image = Image([plan_of(case) for case in batch], "cpu", derive=derive)
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
@given(derive=st.booleans(), data=st.data())
@pytest.mark.by_day("paged_attention", "merge_states")
def test_kernels_get_what_they_get_alone(problem: Problem, derive: bool, data: st.DataObject) -> None:
    """In a batch a kernel would be given other inputs than alone, and failures would not be seen again."""
    batch = data.draw(st.lists(cases(problem), min_size=1, max_size=5))
    image = filled(batch, derive=derive)
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_no_number_is_taken_for_poison(dtype: Dtype) -> None:
    """The second run would be given other numbers, and the kernel accused of depending on dead memory."""
    case = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=512, seq_lens=(300,), scale=1.0, dtype=dtype)
    image = Image([plan_of(case)], "cpu", derive=True)
    words = torch.arange(1 << 16, dtype=torch.int32)
    word = torch.int32 if dtype == "float32" else torch.int16
    every = (words << 8 | 0xFF if dtype == "float32" else words).to(word).view(getattr(torch, dtype))
    numbers = every[~every.isnan()]
    k = image.tensors(0)["k"].view(-1)
    k[: len(numbers)] = numbers
    image.send()
    first, second = bits(image.on_device(0)["k"].flatten(1))
    assert torch.equal(first[: len(numbers)], bits(numbers))
    assert torch.equal(second[: len(numbers)], bits(numbers))
    assert (first[len(numbers) :] == -1).all()
    assert (second[len(numbers) :].view(torch.uint8) == 0x3C).all()


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


@pytest.mark.parametrize("name", ["v", "out", "seq_lens"])
@pytest.mark.parametrize("derive", [False, True])
def test_write_between_two_cases_counts_against_both(name: str, derive: bool) -> None:
    """A kernel that writes far past a tensor would be let off, and the next case alone would be asked."""
    image = filled([CASE, CASE, CASE, CASE], derive=derive)
    tensor = image.on_device(1)[name][0]
    eight_kib = (1 << 13) // tensor.element_size()
    far = tensor.as_strided((1,), (1,), tensor.storage_offset() + eight_kib)
    far.view(torch.uint8).bitwise_not_()
    assert [any(marks) for marks in image.damage(Fetch())] == [False, True, True, False]


@pytest.mark.parametrize("name", ["q", "k", "v", "seq_lens"])
@pytest.mark.parametrize("derive", [False, True])
@pytest.mark.parametrize("run", [0, 1])
def test_modified_input_is_noticed(name: str, derive: bool, run: int) -> None:
    """A kernel that writes to its inputs would pass."""
    image = filled([CASE, CASE], derive=derive)
    bits(image.on_device(1)[name][run]).bitwise_not_()
    assert image.damage(Fetch()) == [(False, False), (run == 0, run == 1)]
    assert image.input_damage(Fetch())[1][run] == (name != "seq_lens")


def test_results_are_no_damage() -> None:
    """A correct kernel's results would be taken for stray writes."""
    image = filled([CASE, CASE])
    for name in ("out", "lse"):
        image.on_device(0)[name].fill_(1.0)
    assert not any(image.arena(i, run, Fetch()).damage() for i in range(2) for run in range(2))
    assert image.damage(Fetch()) == [(False, False)] * 2


def test_size_is_known_before() -> None:
    """A batch would be cut by another measure than the memory it takes."""
    image = filled([CASE] * 2)
    tensors = image.on_device(0)
    taken = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    between = sum(taken.values()) - 2 * plan_of(CASE).nbytes
    assert 0 <= between <= 6 << 14  # after the last case of each area and run


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> Fetch:
    """At home on a GPU that does not exist, so that everything here is elsewhere."""
    monkeypatch.setattr(module, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    return Fetch("cuda")


def test_parts_of_a_buffer_are_found_in_its_copy(fetch: Fetch) -> None:
    """A result would be read from where another one lies."""
    buffer = torch.arange(64, dtype=torch.uint8)
    part = buffer.view(torch.int16).as_strided((2, 3), (8, 2), 5)
    expected = part.clone()
    fetch.start_buffer(buffer)
    buffer.zero_()
    assert torch.equal(fetch.at_home(part), expected)


def test_parts_of_a_storage_are_copied_once(fetch: Fetch) -> None:
    """Each of many small results would cost a copy."""
    numbers = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    parts = [numbers[0], numbers[1:, ::2], numbers[2, 3]]
    expected = [part.clone() for part in parts]
    for part in parts:
        fetch.start_storage(part)
    numbers.zero_()
    assert len(fetch._buffers) == 1
    assert all(torch.equal(fetch.at_home(part), other) for part, other in zip(parts, expected, strict=True))


def test_results_of_a_dtype_are_copied_together(fetch: Fetch) -> None:
    """Each of many small results would cost a copy, or be taken for another one."""
    buffer = torch.arange(8.0)
    fetch.start_buffer(buffer.view(torch.uint8))
    tensors = [torch.arange(6).view(2, 3).T, torch.ones(2, 2), torch.tensor(7), torch.zeros(3), buffer[2:5]]
    expected = [tensor.clone() for tensor in tensors]
    fetch.start(tensors)
    for tensor in tensors:
        tensor.zero_()
    assert len({fetch.at_home(tensor).untyped_storage().data_ptr() for tensor in tensors}) == 3
    assert all(torch.equal(fetch.at_home(tensor), other) for tensor, other in zip(tensors, expected, strict=True))


def test_what_is_at_home_is_not_copied() -> None:
    """Kernels on a CPU would pay for copies that nobody needs."""
    here, tensor = Fetch("cpu"), torch.ones(3)
    here.start([tensor])
    here.start_storage(tensor)
    here.start_buffer(tensor.view(torch.uint8))
    assert here.at_home(tensor) is tensor
