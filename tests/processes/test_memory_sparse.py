"""Huge buffers that take no memory, and die where they should."""

from __future__ import annotations

import mmap
import signal
from pathlib import Path

import pytest
import torch

from attnfuzz.memory.address_space import SparseUnavailable
from attnfuzz.memory.sparse import CudaSparseMemory, SparseBuffer
from tests.processes.host_virtual_memory import GRANULE, HostVirtualMemory, permissions
from tests.scripts import run_script

TOUCH_BELOW = """
import sys
from attnfuzz.memory.sparse import SparseBuffer
buffer = SparseBuffer(1 << 34, below=1 << 34)
lowest, distance = buffer.upper.data_ptr(), int(sys.argv[1])
import ctypes
ctypes.c_ubyte.from_address(lowest - distance).value
"""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def write_and_read(buffer: SparseBuffer) -> None:
    """64 elements all over the buffer, and their neighbours."""
    upper = buffer.upper.view(torch.float16)
    places = torch.arange(0, upper.numel(), upper.numel() // 64)
    upper[places] = 1.0
    assert upper[places].sum() == len(places)
    assert upper[places + 1].sum() == 0.0


def test_only_what_is_written_takes_memory() -> None:
    """A case at high page ids would need a machine as large as its cache."""
    write_and_read(SparseBuffer(1 << 16))  # torch's own first use
    before = resident_bytes()
    buffer = SparseBuffer(1 << 38, below=1 << 38)
    write_and_read(buffer)
    assert resident_bytes() - before < 2 << 20


def test_memory_is_given_back_with_the_last_tensor() -> None:
    """A campaign would fill memory, or a kernel that keeps a tensor would die of it in a later case."""

    def filled() -> torch.Tensor:
        kept = SparseBuffer(1 << 34).upper[: 8 << 20]
        assert kept.fill_(1).sum() == 8 << 20
        return kept

    filled()  # torch's own first use
    before = resident_bytes()
    kept = filled()
    assert resident_bytes() - before > 7 << 20
    del kept
    assert resident_bytes() - before < 1 << 20


@pytest.mark.parametrize("distance", [1, 1 << 31, 1 << 34])
@pytest.mark.by_day("2147483648")
def test_a_touch_below_is_deadly(distance: int) -> None:
    """A negative offset would read whatever lies there, and pass for a right one."""
    run = run_script(TOUCH_BELOW, distance)
    assert run.returncode == -signal.SIGSEGV, run.stderr


def test_a_part_below_can_be_opened() -> None:
    """Decoys could not be laid where a wrapped offset lands."""
    buffer = SparseBuffer(1 << 32, below=1 << 32)
    buffer.opened(-(1 << 31) + 3, 10_000).fill_(7)
    assert buffer.opened(-(1 << 31) + 3, 10_000).sum() == 70_000
    assert buffer.upper[:16].sum() == 0
    with pytest.raises(ValueError, match="must lie within"):
        buffer.opened(-(1 << 32) - 1, 1)
    with pytest.raises(ValueError, match="must lie within"):
        buffer.opened((1 << 32) - 1, 2)


BACKGROUND = 85 * GRANULE
"""What is mapped for good."""


def test_live_granules_have_memory_of_their_own_and_the_rest_numbers() -> None:
    """A wrong offset would read zeros, or what lives would be shared with what does not."""
    made = CudaSparseMemory(HostVirtualMemory())
    end = 100 * GRANULE
    upper = made.buffer(end, below=3 * GRANULE, live={40: 0, 41: 1}, readable={(0, end)}, numbers=True)
    words = upper.view(torch.float16).view(100, -1)
    assert upper.numel() == end
    assert words[40:42].eq(0).all()
    words[40:42] = 1.0
    others = torch.cat([words[:40], words[42:]])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        numbers = others.view(dtype).abs()
        assert float(numbers.min()) >= 0.5
        assert float(numbers.max()) <= 8
    assert len(set(words[0].tolist())) > 500
    assert permissions(upper.data_ptr() - 1).startswith("---")
    assert permissions(upper.data_ptr() + end).startswith("---") or permissions(upper.data_ptr() + end) == ""


def test_granules_with_one_number_share_their_memory() -> None:
    """Rows a gigabyte apart would take two megabytes each."""
    made = CudaSparseMemory(HostVirtualMemory())
    upper = made.buffer(50 * GRANULE, below=0, live={0: 7, 30: 7}, readable=(), numbers=False)
    upper[5] = 3
    assert upper[30 * GRANULE + 5] == 3
    assert permissions(upper.data_ptr() + 10 * GRANULE).startswith("---")


def test_only_decoys_below_can_be_read() -> None:
    """An offset that came out negative would find memory everywhere, or nothing where a decoy is due."""
    made = CudaSparseMemory(HostVirtualMemory())
    readable = {(-GRANULE - 1, -GRANULE + 1), (-100 * GRANULE, -5 * GRANULE)}
    upper = made.buffer(GRANULE, below=6 * GRANULE, live={0: 0}, readable=readable, numbers=True)
    seen = [permissions(upper.data_ptr() + i * GRANULE)[:2] for i in range(-6, 1)]
    assert seen == ["rw", "--", "--", "--", "rw", "rw", "rw"]


def test_a_buffer_is_used_again_where_nothing_refers_to_it() -> None:
    """Each case would map gigabytes anew; or write into what another tensor still holds."""
    memory = HostVirtualMemory()
    made = CudaSparseMemory(memory)
    addresses = []
    for nbytes in (70 * GRANULE, 69 * GRANULE + 5, 70 * GRANULE - 1):
        upper = made.buffer(nbytes, below=0, live={0: 0, 1: 1}, readable={(0, 70 * GRANULE)}, numbers=True)
        assert upper[: 2 * GRANULE].eq(0).all()
        upper[: 2 * GRANULE] = 1
        view = upper[5:]
        del upper
        other = made.buffer(nbytes, below=0, live={0: 0, 1: 1}, readable={(0, 70 * GRANULE)}, numbers=True)
        assert other.data_ptr() != view.data_ptr() - 5
        addresses.append({other.data_ptr(), view.data_ptr() - 5})
        del view, other
    assert addresses[0] == addresses[1] == addresses[2]
    made.release()
    assert memory.mapped == BACKGROUND
    assert len(memory.created) == 4 + 4


def test_few_idle_buffers_are_kept() -> None:
    """A campaign would run out of addresses, or of the GPU's memory."""
    memory = HostVirtualMemory()
    made = CudaSparseMemory(memory)
    for count in range(1, 60):
        made.buffer(count * GRANULE, below=0, live={0: 0}, readable={(0, count * GRANULE)}, numbers=True)
    assert len(made._idle) <= 25
    for count in range(1, 60):
        live = {i: i for i in range(count % 9 + 20)}
        made.buffer(count * 40 * GRANULE, below=0, live=live, readable=(), numbers=True)
    assert len(memory.created) <= 4 + 64 + 2 * 28


def test_stray_writes_do_not_stay() -> None:
    """A kernel would be judged by what another one left."""
    made = CudaSparseMemory(HostVirtualMemory())
    for numbers in (True, False):
        first = made.buffer(4 * GRANULE, below=0, live={}, readable={(0, 4 * GRANULE)}, numbers=numbers)
        before = first.clone()
        first[10] = 77
        again = made.buffer(4 * GRANULE, below=0, live={}, readable={(0, 4 * GRANULE)}, numbers=numbers)
        assert torch.equal(again, before)


@pytest.mark.parametrize(
    ("nbytes", "live", "words"),
    [
        (1 << 41, {}, "bytes of addresses are more than"),
        (GRANULE * 18000, {}, "mappings are more than 4096"),
        (GRANULE * 64, {i: i for i in range(40)}, "granules of GPU memory are more than 32"),
    ],
)
def test_too_much_is_refused_before_anything_is_taken(nbytes: int, live: dict[int, int], words: str) -> None:
    """A case would take seconds to map, or the memory of other processes."""
    memory = HostVirtualMemory()
    made = CudaSparseMemory(memory)
    readable = {(i * 2 * GRANULE, (i * 2 + 1) * GRANULE) for i in range(9000)}
    with pytest.raises(SparseUnavailable, match=words):
        made.buffer(nbytes, below=0, live=live, readable=readable, numbers=True)
    assert memory.mapped <= BACKGROUND
