"""attnfuzz.campaign.triage.confirmation: deaths of memory are traced to a leak, confirmed and shrunk as one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.messages import Confirmed, Duplicate, Minimised, Smaller
from attnfuzz.corpus import load_regression
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import FailingCase, KnownBugs
from attnfuzz.problems.cases import Case, DenseDecodeCase, decode_case
from attnfuzz.verdict import Failure, Verdict
from tests.campaign.pretended_gpu import LIMIT
from tests.campaign.pretended_process import a_case, looked_into
from tests.campaign.test_investigation import explore, last, replay
from tests.common.named_features import words
from tests.common.scripted_runner import judging, scripted
from tests.common.search_bench import KERNEL
from tests.faults.campaigns import Campaign

KERNELS = Path(__file__).parents[1] / "common" / "leaking_kernels.py"
LEAK = Failure(oracle="crash", kind="leak", message="every call keeps another 16.0 MiB of memory (seen over 20 calls)")
OUT_OF_MEMORY = Failure(oracle="crash", kind="memory", message="the kernel's process outgrew its memory limit")
OUT_OF_GPU_MEMORY = Failure(oracle="exception", kind="OutOfMemoryError in kernel", message="CUDA out of memory")


def judge(declaration: Declaration, case: Case, **how: Any) -> Verdict:
    return Verdict()


def leaks_with_groups(declaration: Declaration, case: Case, **how: Any) -> Failure | None:
    assert isinstance(case, DenseDecodeCase)
    return LEAK if case.gqa_ratio > 1 else None


def investigated(failure: Failure, known: KnownBugs, case: Case | None = None) -> tuple[bool, list[msgspec.Struct]]:
    timed = judging(scripted(judge, find_leak=leaks_with_groups))
    suspect = FailingCase(KERNEL, a_case(9, num_q_heads=4) if case is None else case, failure, (a_case(5),) * 3)
    return looked_into(suspect, timed, known)


def test_a_death_of_memory_becomes_the_leak_behind_it() -> None:
    """Alone the case passes, and what kills servers would be reported as seen once."""
    for failure in (OUT_OF_MEMORY, OUT_OF_GPU_MEMORY, LEAK):
        known = KnownBugs()
        found, sent = investigated(failure, known)
        assert found
        smallest = last(sent, Smaller)
        case = decode_case("dense_decode", bytes(smallest.case))
        assert isinstance(case, DenseDecodeCase)
        assert (case.num_q_heads, case.seq_lens) == (2, (1,))
        assert (smallest.failure, smallest.preceding) == (LEAK, ())
        assert last(sent, Confirmed).failed == last(sent, Confirmed).runs
        assert words(last(sent, Minimised).features) == {"gqa_ratio>1", "several query heads"}
        assert known.predicting(
            FailingCase(KERNEL, msgspec.structs.replace(a_case(9, num_q_heads=4), seq_lens=(3, 9)), failure)
        )


def test_the_next_death_of_a_known_leak_is_known() -> None:
    """Each worker would report it again."""
    known = KnownBugs()
    investigated(LEAK, known)
    _, sent = investigated(OUT_OF_MEMORY, known)
    assert last(sent, Duplicate).bugs[0].kind == "memory"
    assert not [message for message in sent if isinstance(message, Minimised)]


def test_a_death_of_memory_without_a_leak_stays_what_it_is() -> None:
    """A machine that was short of memory for a moment makes no kernel leak."""
    found, _ = investigated(OUT_OF_MEMORY, KnownBugs(), a_case(9))
    assert not found


@pytest.mark.night
def test_a_campaign_finds_shrinks_and_replays_a_leak(tmp_path: Path) -> None:
    """What is saved has to fail again by itself, for as long as the kernel leaks."""
    found = explore(f"{KERNELS}:keeps_with_groups", tmp_path)
    assert (found.saved.finding.oracle, found.saved.finding.kind) == ("crash", "leak")
    assert "every call keeps another 16.0 MiB" in found.saved.finding.message
    assert found.saved.finding.features == ("gqa_ratio>1",)
    assert found.saved.preceding == ()
    assert found.lengths == (1,)
    replayed = replay(found.path, tmp_path)
    assert replayed["outcome"] == "fail"
    assert "every call keeps another" in replayed["message"]


@pytest.mark.night
def test_after_the_finding_a_leak_costs_no_process(tmp_path: Path) -> None:
    """A death every thirty cases, and the cases of a batch that are run again, slow down all that is searched."""
    kernels = f"{KERNELS}:keeps_16_mebibytes"
    with Campaign(tmp_path, "--device", "cpu", "--budget", "300s", kernels=kernels, workers=1) as campaign:
        campaign.wait_for("shrunk", timeout_s=120)
        campaign.wait_for_cases(100)  # of which a process lasts for thirty
        campaign.end()
    assert "kernel processes restarted 0 times" in campaign.output, campaign.output


@pytest.mark.night
def test_a_campaign_finds_a_leak_of_gpu_memory(tmp_path: Path) -> None:
    """There no process outgrows a limit: a batch is lost, or the kernel or attnfuzz is told that no memory is left."""
    targets = [f"{KERNELS}:{kernel}" for kernel in ("keeps_with_groups", "keeps_once")]
    command = [sys.executable, "-m", "tests.campaign.pretended_gpu", "explore", *targets, "--device", "cuda"]
    command += ["--workers", "2", "--fail-fast", "--budget", "120s", "--seed", "1", "--save-dir", str(tmp_path)]
    environment = {**os.environ, LIMIT: str(300 << 20)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=240)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert "internal error" not in output, output
    (regression,) = [load_regression(path) for path in tmp_path.glob("*.json")]
    assert (regression.finding.oracle, regression.finding.kind) == ("crash", "leak"), output
    assert "every call keeps another 16.0 MiB of GPU memory" in regression.finding.message
    assert regression.finding.features == ("gqa_ratio>1",), output
