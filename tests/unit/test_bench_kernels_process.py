"""The process that runs what is timed: its death is one contender's result."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnfuzz.bench.kernels.measurements import MeasureRequest
from attnfuzz.bench.kernels.run import Crashed, TimingProcess
from attnfuzz.bench.kernels.shapes import Shape
from attnfuzz.declaration import KernelLoadError
from attnfuzz.problems.supports import OptionValue

KERNELS = str(Path(__file__).parent / "timed_kernels.py")
SHAPE = Shape(label="", num_q_heads=4, num_kv_heads=2, head_size=16, seq_lens=(40, 40), block_size=8)


def test_a_kernel_that_dies_costs_only_its_own_times() -> None:
    """One crash would end a run of many minutes, or be taken for a time."""
    with TimingProcess("cpu") as process:
        with pytest.raises(KernelLoadError, match="no kernel 'nothing'"):
            process.declarations([f"{KERNELS}:nothing"])
        choices: list[tuple[str, dict[str, OptionValue]]] = [("dies", {}), ("right", {"num_splits": 1})]
        deadly, right = (
            MeasureRequest(contender=f"{KERNELS}:{name}", shape=SHAPE, options=options, l2=("warm",))
            for name, options in choices
        )
        with pytest.raises(Crashed, match="7"):
            process.measure(deadly)
        assert process.measure(right).status == "ok"
        assert process.copy(1 << 12, 1e-3).median_us > 0
