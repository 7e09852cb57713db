"""Huge buffers that take no memory, and die where they should."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnfuzz.memory.sparse import SparseBuffer

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
    before = resident_bytes()
    kept = SparseBuffer(1 << 34).upper[: 8 << 20]
    kept.fill_(1)
    assert resident_bytes() - before > 7 << 20
    assert kept.sum() == 8 << 20
    del kept
    assert resident_bytes() - before < 1 << 20


@pytest.mark.parametrize("distance", [1, 1 << 31, 1 << 34])
def test_a_touch_below_is_deadly(distance: int) -> None:
    """A negative offset would read whatever lies there, and pass for a right one."""
    run = subprocess.run([sys.executable, "-c", TOUCH_BELOW, str(distance)], capture_output=True, timeout=60)
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
