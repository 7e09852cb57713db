"""Uninitialised buffers that a kernel keeps hold in each run what memory holds there that nobody has written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.kept import _MOST_NBYTES, KeptBuffers
from attnfuzz.memory.patterns import Fill, holds_prefill, prefill_


def given(kept: KeptBuffers, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, fill: Fill = "nan") -> Tensor:
    made = torch.empty(shape, dtype=dtype)
    prefill_(made, fill)
    kept.add(made, fill)
    return made


def test_only_what_nobody_has_written_to_changes() -> None:
    """A table that a kernel has filled would be overwritten, or what it never wrote hold NaN in every run."""
    kept = KeptBuffers()
    buffer = given(kept, (4, 3))
    buffer[1] = 5.0
    assert kept.renew("finite")[0] is buffer
    assert bool(holds_prefill(buffer[[0, 2, 3]], "finite").all())
    assert buffer[1].tolist() == [5.0] * 3
    buffer[2] = torch.nan
    kept.renew("low")
    assert bool(holds_prefill(buffer[[0, 3]], "low").all())
    assert bool(buffer[2].isnan().all())


def test_what_looks_unwritten_later_was_written() -> None:
    """A number that a kernel computes by chance would be replaced in a later run."""
    kept = KeptBuffers()
    buffer = given(kept, (2,), torch.bfloat16)
    buffer[0] = 1.0
    kept.renew("finite")
    number = buffer[1].clone()
    buffer[0] = number  # bit for bit what the other element holds
    kept.renew("low")
    assert buffer[0] == number
    assert bool(holds_prefill(buffer[1], "low"))


def test_a_view_keeps_its_buffer() -> None:
    """A kernel that keeps part of what it allocates would be taken to keep nothing."""
    with TrackedAllocations("cpu", poison="nan", prefill="nan"):
        part = torch.empty(6, 2)[2:4]
    with TrackedAllocations("cpu", poison="finite", prefill="finite") as allocations:
        pass
    assert [buffer.shape for buffer in allocations.kept] == [(6, 2)]
    assert bool(holds_prefill(part, "finite").all())


def test_what_is_kept_no_longer_is_forgotten() -> None:
    """Memory that has been given to somebody else would be overwritten."""
    with TrackedAllocations("cpu", poison="nan", prefill="nan") as before:
        torch.empty(5)
    with TrackedAllocations("cpu", poison="finite", prefill="finite") as allocations:
        pass
    assert allocations.kept == []
    assert bool(holds_prefill(before.arena.regions[0].tensor, "nan").all())


def test_once_all_of_it_is_written_it_is_left_alone() -> None:
    """Each run would look through all that a kernel keeps, for nothing."""
    kept = KeptBuffers()
    buffer = given(kept, (3,))
    buffer.fill_(1.0)
    assert kept.renew("finite") == []
    prefill_(buffer, "nan")
    kept.renew("finite")
    assert bool(holds_prefill(buffer, "nan").all())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.bool, torch.float8_e4m3fn])
def test_formats_in_which_numbers_look_unwritten_are_left_alone(dtype: torch.dtype) -> None:
    """What a kernel keeps there would be changed behind its back."""
    kept = KeptBuffers()
    buffer: Any = given(kept, (4,), dtype)
    assert kept.renew("finite") == []
    assert bool(holds_prefill(buffer, "nan").all())


def test_buffers_made_in_inference_mode_are_renewed() -> None:
    """torch refuses to change these outside of it: the next run would end in its error."""
    with torch.inference_mode(), TrackedAllocations("cpu", poison="nan", prefill="nan"):
        buffer = torch.empty(3)
    with TrackedAllocations("cpu", poison="finite", prefill="finite"):
        pass
    assert bool(holds_prefill(buffer, "finite").all())


def test_buffers_of_a_moment_push_no_kept_one_out() -> None:
    """A workspace would be forgotten in the call that makes it, if that makes many small buffers after it."""
    kept = KeptBuffers()
    buffer = given(kept, (3,))
    for _ in range(200):
        given(kept, (2,))
    assert [one.shape for one in kept.renew("finite")] == [(3,)]
    assert bool(holds_prefill(buffer, "finite").all())


def test_of_more_than_is_looked_at_the_newest_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that keeps a workspace for each shape would hold stale numbers in the one that it uses now."""
    kept = KeptBuffers()
    buffers = [given(kept, (4,)) for _ in range(3)]
    monkeypatch.setitem(_MOST_NBYTES, "cpu", 40)
    found = kept.renew("finite")
    assert [one.data_ptr() for one in found] == [one.data_ptr() for one in buffers[:0:-1]]
    assert bool(holds_prefill(buffers[2], "finite").all())
    assert bool(holds_prefill(buffers[0], "nan").all())
