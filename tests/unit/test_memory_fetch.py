"""Copies that are found by what they are copies of. Host memory stands for a GPU's: only the name of home differs."""

from __future__ import annotations

import pytest
import torch

from attnfuzz.memory import fetch as module
from attnfuzz.memory.fetch import Fetch


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
