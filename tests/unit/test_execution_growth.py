"""attnfuzz.execution.growth: calls of a kernel in this process, and what they leave."""

from __future__ import annotations

from pathlib import Path

from attnfuzz.declaration import load_kernels
from attnfuzz.execution.growth import GrowthTrial
from attnfuzz.problems.cases import DenseDecodeCase

KERNELS = Path(__file__).parent / "leaking_kernels.py"
CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=16, seq_lens=(3,), scale=0.25, dtype="float32")


def growth(kernel: str, calls: int) -> int:
    (loaded,) = load_kernels(f"{KERNELS}:{kernel}")
    trial = GrowthTrial(loaded, CASE, device="cpu")
    before = trial.use_after(calls)
    return trial.use_after(calls).host_bytes - before.host_bytes


def test_what_the_kernel_keeps_is_counted_as_it_is() -> None:
    """Red zones around what a kernel allocates, and the inputs of attnfuzz, are not its leak."""
    assert abs(growth("keeps_16_mebibytes", 4) - (64 << 20)) < 2 << 20


def test_garbage_is_not_counted() -> None:
    """Python frees cycles later, and would have freed these."""
    assert growth("makes_cycles", 20) < 10 << 20
