"""Kernels that keep GPU memory, and what keeps it for good reasons: allocators, libraries and compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.simplest import simplest_case
from tests.faults.campaigns import Campaign, saved

KERNELS = Path(__file__).parents[1] / "unit" / "leaking_kernels.py"
CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=16, seq_lens=(3,), scale=0.25, dtype="float32")


@pytest.mark.parametrize(
    ("kernel", "each"),
    [("keeps_16_mebibytes", "16.0 MiB"), ("keeps_a_little", "32.0 KiB"), ("keeps_much", "100.0 MiB")],
)
def test_a_leak_of_gpu_memory_is_told_as_such(runner: Runner, kernel: str, each: str) -> None:
    """Whoever looks for it in the host's memory looks in vain."""
    (declaration,) = runner.declarations([f"{KERNELS}:{kernel}"])
    found = runner.find_leak(declaration, CASE)
    assert found is not None
    assert f"every call keeps another {each} of GPU memory" in found.message


@pytest.mark.parametrize("kernel", ["keeps_the_latest", "keeps_once", "makes_cycles"])
def test_kernels_that_keep_memory_within_bounds(runner: Runner, kernel: str) -> None:
    """Caches are what makes kernels fast."""
    (declaration,) = runner.declarations([f"{KERNELS}:{kernel}"])
    assert runner.find_leak(declaration, CASE) is None


def test_bundled_kernels_do_not_leak(runner: Runner) -> None:
    """Triton keeps what it has compiled, and CUDA a context."""
    for declaration in runner.declarations(["*"]):
        case = simplest_case(declaration.problem, declaration.supports, declaration.options)
        assert runner.find_leak(declaration, case) is None, declaration.target


def test_a_campaign_finds_a_leak_of_gpu_memory(tmp_path: Path) -> None:
    """On a GPU no process outgrows a limit: the kernel, or the framework, is told that there is no memory left."""
    kernels = f"{KERNELS}:keeps_with_groups {KERNELS}:keeps_once"
    with Campaign(tmp_path, "--budget", "120s", kernels=kernels, workers=2) as campaign:
        assert campaign.wait(timeout_s=240.0) == 1, campaign.output
    assert "internal error" not in campaign.output, campaign.output
    (regression,) = saved(tmp_path)
    assert (regression.finding.oracle, regression.finding.kind) == ("crash", "leak"), campaign.output
    assert "every call keeps another 16.0 MiB of GPU memory" in regression.finding.message
    assert regression.finding.features == ("gqa_ratio>1",), campaign.output
