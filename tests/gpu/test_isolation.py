"""Kernels that lose the CUDA context, hang on the GPU, or take the process or the memory: the next case passes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from attnfuzz.declaration import Declaration
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.recipes import Values
from attnfuzz.verdict import Verdict

Broken = dict[str, Declaration]

CASE = DenseDecodeCase(
    num_q_heads=4, num_kv_heads=2, head_size=16, seq_lens=(5, 0, 37), scale=0.25, extra_rows=2,
    values=Values(keys="normal", values="normal"),
)  # fmt: skip
LARGE = DenseDecodeCase(num_q_heads=8, num_kv_heads=8, head_size=128, seq_lens=(8192,), scale=0.1, dtype="float32")
HANG_S = 8.0


def judge_and_go_on(runner: Runner, broken: Broken, name: str, *, replaced: int, timeout_s: float = 60.0) -> Verdict:
    """The verdict on the kernel ``name``, after which a correct one passes, in a process ``replaced`` times new."""
    assert runner.judge(broken["correct"], CASE).failure is None
    restarts = runner.restarts
    verdict = runner.judge(broken[name], CASE, timeout_s=timeout_s)
    assert runner.judge(broken["correct"], CASE).failure is None
    assert runner.restarts == restarts + replaced
    return verdict


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("writes_far_away", "cuda:illegal memory access"),
        ("reads_far_away", "cuda:illegal memory access"),
        ("reads_misaligned", "cuda:misaligned address"),
        ("asserts", "cuda:device-side assert triggered"),
        ("indexes_out_of_range", "cuda:device-side assert triggered"),
        ("wraps_the_error", "cuda:illegal memory access"),
        ("raises_too_early", "cuda:illegal memory access"),
    ],
)
def test_lost_context(name: str, kind: str, runner: Runner, broken: Broken) -> None:
    """Every case after an illegal access would fail in the framework, or be blamed on the next kernel."""
    verdict = judge_and_go_on(runner, broken, name, replaced=1)
    assert verdict.fatal
    assert verdict.failure is not None
    assert (verdict.failure.oracle, verdict.failure.kind) == ("crash", kind)


def test_hang(runner: Runner, broken: Broken) -> None:
    """A kernel that spins on the GPU would stop the campaign, or go on spinning beside the next cases."""
    runner.judge(broken["correct"], CASE)
    pid = runner._executor.pid
    started = time.monotonic()
    verdict = judge_and_go_on(runner, broken, "never_returns", replaced=1, timeout_s=HANG_S)
    assert time.monotonic() - started < HANG_S + 30
    assert not Path(f"/proc/{pid}").exists()
    assert verdict.failure is not None
    assert (verdict.failure.oracle, verdict.failure.kind) == ("hang", "timeout")
    # With other processes on the GPU, the hanging one may not get to write its stack: then this is all that is known.
    assert verdict.failure.message.startswith(f"the kernel did not finish within {HANG_S:.3g} s")


def test_hang_does_not_stop_other_executors(runner: Runner, broken: Broken) -> None:
    """One hanging kernel would make every worker's cases look as if they hung."""
    with runner.sibling() as other:
        other.judge(broken["correct"], CASE)
        judge_and_go_on(runner, broken, "never_returns", replaced=1, timeout_s=HANG_S)
        assert other.judge(broken["correct"], CASE, timeout_s=HANG_S).failure is None
        assert other.restarts == 0


@pytest.mark.parametrize(("name", "kind"), [("segfaults", "SIGSEGV"), ("exits", "exit 3")])
def test_dead_process(name: str, kind: str, runner: Runner, broken: Broken) -> None:
    """A process that dies with a CUDA context would take the driver along, or leave the GPU unusable."""
    verdict = judge_and_go_on(runner, broken, name, replaced=1)
    assert verdict.failure is not None
    assert (verdict.failure.oracle, verdict.failure.kind) == ("crash", kind)


def test_refused_launch(runner: Runner, broken: Broken) -> None:
    """An executor would be thrown away, with all it has compiled, for a launch that CUDA merely refused."""
    verdict = judge_and_go_on(runner, broken, "launches_too_large_a_grid", replaced=0)
    assert not verdict.fatal
    assert verdict.failure is not None
    assert (verdict.failure.oracle, verdict.failure.kind) == ("exception", "RuntimeError in launches_too_large_a_grid")
    assert "invalid argument" in verdict.failure.message


def test_result_on_the_host(runner: Runner, broken: Broken) -> None:
    """A result that the caller cannot use would be compared all the same."""
    verdict = judge_and_go_on(runner, broken, "returns_on_the_host", replaced=0)
    assert verdict.failure is not None
    assert verdict.failure.kind == "result"
    assert verdict.failure.message == "the kernel returned out on cpu; it must be on cuda:0"


def test_exhausted_memory(runner: Runner, broken: Broken) -> None:
    """A kernel that allocates without end would take the memory of every other worker on the GPU."""
    with runner.sibling() as other:
        verdict = judge_and_go_on(runner, broken, "allocates_without_end", replaced=1)
        assert other.judge(broken["correct"], LARGE).failure is None
        assert other.restarts == 0
    assert verdict.failure is not None
    assert (verdict.failure.oracle, verdict.failure.kind) == (
        "exception", "OutOfMemoryError in allocates_without_end",
    )  # fmt: skip


def test_memory_that_a_kernel_keeps(runner: Runner, broken: Broken) -> None:
    """The case after a kernel that keeps memory would fail for want of it."""
    restarts = runner.restarts
    assert runner.judge(broken["keeps_memory"], CASE).failure is None
    assert runner.restarts == restarts
    assert runner.judge(broken["correct"], LARGE).failure is None
    assert runner.restarts == restarts + 1
