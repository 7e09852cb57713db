"""attnfuzz.judging.special_runs: calls of a kernel in this process, and what they leave."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.judging import special_runs as growth_module
from attnfuzz.judging.special_runs import GrowthTrial
from attnfuzz.problems.cases import DenseDecodeCase

KERNELS = Path(__file__).parent / "leaking_kernels.py"
CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=16, seq_lens=(3,), scale=0.25, dtype="float32")


class Cycle:
    """Freed by the collector alone."""

    def __init__(self) -> None:
        self.itself = self


def growth(kernel: str, calls: int) -> int:
    (loaded,) = load_kernels(f"{KERNELS}:{kernel}")
    trial = GrowthTrial(loaded, CASE, device="cpu")
    before = trial.use_after(calls)
    return trial.use_after(calls).host_bytes - before.host_bytes


def test_what_the_kernel_keeps_is_counted_as_it_is() -> None:
    """Red zones around what a kernel allocates, and the inputs of attnfuzz, are not its leak."""
    # In a process of its own, as executors are: from this one goes what earlier tests have left.
    script = f"import runpy; print(runpy.run_path({__file__!r})['growth']('keeps_16_mebibytes', 4))"
    grown = int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)
    assert abs(grown - (64 << 20)) < 2 << 20


def test_garbage_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python frees cycles later, and would have freed these."""
    alive: weakref.WeakSet[Cycle] = weakref.WeakSet()
    (correct,) = load_kernels("dense_eager")

    def makes_cycles(inputs: Any) -> Any:
        alive.add(Cycle())
        return correct(inputs)

    # Of a process only the collector's part can be foretold: what is freed, malloc may keep, and tests before this one
    # have a say in that.
    monkeypatch.setattr(growth_module, "resident_bytes", lambda pid: len(alive))
    monkeypatch.setattr(growth_module, "descendant_bytes", lambda pid: 0)
    trial = GrowthTrial(Kernel(makes_cycles, correct.declaration), CASE, device="cpu")
    gc.disable()
    try:
        assert trial.use_after(20).host_bytes == 0
    finally:
        gc.enable()
