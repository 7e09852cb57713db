"""Kernels under NVIDIA's compute-sanitizer, where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from attnfuzz.cli import replay
from attnfuzz.corpus import FindingRecord, Regression, write_regression
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.sanitizer.running import TOOLS, SanitizerUnavailable, Tool, find_executable

KERNELS = Path(__file__).with_name("broken_kernels.py")
CASE = DenseDecodeCase(num_q_heads=4, num_kv_heads=2, head_size=16, seq_lens=(5, 0, 37), scale=0.25)


@pytest.fixture(autouse=True)
def installed() -> None:
    try:
        find_executable()
    except SanitizerUnavailable as missing:
        pytest.skip(str(missing))


def replayed(kernel: str, tool: Tool, folder: Path) -> tuple[int, str]:
    """The exit status of a replay of `CASE` under `tool`, and what it prints, in one line."""
    finding = FindingRecord(oracle="accuracy", message="a case")
    target = f"{KERNELS}:{kernel}"
    write_regression(Regression(problem="dense_decode", kernel=target, case=CASE, finding=finding), folder)
    arguments = [str(folder), "--kernel", target, "--device", "cuda", "--sanitizer", tool]
    result = CliRunner().invoke(replay.command, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value.status, " ".join(result.output.split())


def test_a_write_behind_a_tensor_is_named(tmp_path: Path) -> None:
    """The tool sees nothing inside of an allocation that holds several tensors."""
    status, output = replayed("writes_after_out", "memcheck", tmp_path)
    assert status == 1, output
    assert "sanitizer/memcheck: Invalid __global__ write of size 2 bytes: Invalid" in output
    assert "in store_kernel" in output
    assert "1 byte past the end of out" in output


def test_a_read_of_memory_that_nobody_has_written_is_found(tmp_path: Path) -> None:
    """Torch's allocator would give out memory that an earlier tensor has written."""
    status, output = replayed("reads_workspace_early", "initcheck", tmp_path)
    assert status == 1, output
    assert "sanitizer/initcheck: Uninitialized __global__ memory read of size 4 bytes" in output
    assert "in add_zero_times_kernel" in output


@pytest.mark.parametrize("tool", TOOLS)
def test_a_correct_kernel_passes(tool: Tool, tmp_path: Path) -> None:
    """What torch and Triton do to set up, or the tensors of a case, would be taken for a kernel's error."""
    status, output = replayed("correct", tool, tmp_path)
    assert status == 0, output
    assert "1 saved case, 1 run: 0 failed" in output
