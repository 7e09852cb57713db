"""Faults on a GPU: kills while CUDA contexts live, and what is left of them."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

from attnfuzz.isolation.process import resident_bytes
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import DenseDecodeCase
from tests.faults.campaigns import Campaign, assert_nothing_half_written, saved
from tests.faults.test_random_kills import kill_at_random

KILLS = 25
CASE = DenseDecodeCase(num_q_heads=8, num_kv_heads=8, head_size=128, seq_lens=(4096,), scale=0.1, dtype="float32")


def test_kills_on_a_gpu_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    """A context killed in the middle of a launch would take the other workers' along."""
    with Campaign(tmp_path, "--budget", "240s", workers=4) as campaign:
        campaign.wait_for("searching", timeout_s=120)  # before that nobody else would start what is killed
        killed = kill_at_random(campaign.family, random.Random(7), KILLS, campaign)
        campaign.wait_for("shrunk", timeout_s=120)
        campaign.process.terminate()
        assert campaign.wait() == 128 + signal.SIGTERM
        print(dict(killed), campaign.output)
        assert campaign.family.left_after() == []
    assert "internal error" not in campaign.output
    assert {regression.kernel.rpartition(":")[2] for regression in saved(tmp_path)} == {"wrong"}
    assert_nothing_half_written(tmp_path)


def test_a_campaign_killed_on_a_gpu_leaves_nothing(tmp_path: Path) -> None:
    """Processes without a master would hold the GPU, which frees a process's memory once it has ended."""
    with Campaign(tmp_path, "--budget", "240s", workers=4) as campaign:
        campaign.wait_for("confirmed", timeout_s=120)
        campaign.process.kill()
        assert campaign.family.left_after() == []
    assert_nothing_half_written(tmp_path)


def test_an_executor_on_a_gpu_is_far_below_its_memory_limit(
    runner: Runner, record_property: Callable[[str, object], None]
) -> None:
    """Kernels that leak nothing would be ended for the libraries that CUDA loads."""
    (kernel,) = runner.declarations(["dense_eager"])
    at_first = runner.resident_bytes
    for _ in range(20):
        assert runner.judge(kernel, CASE).failure is None
    pid = runner._executor.pid
    assert pid is not None
    grown = (resident_bytes(pid) or 0) - at_first
    record_property("resident_mib", (at_first + grown) >> 20)
    assert grown < 2 << 30
