"""A campaign on a GPU, from the command line: planted bugs are found and shrunk, correct kernels left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnfuzz.execution.runner import Runner
from attnfuzz.problems.cases import encode_case
from tests.quality.hunting import hunt
from tests.quality.mutants import mutant_named

BUDGET_S = 30
NUM_BUNDLED = 11

Record = Callable[[str, object], None]


@pytest.mark.parametrize(
    "name", ["odd_group_size", "v_not_masked", "empty_split_not_written", "merge_both_empty", "fp16_accumulator"]
)
def test_planted_bug(name: str, tmp_path: Path, runner: Runner, record_property: Record) -> None:
    """A bug would be missed on a GPU, reported large, or blamed on a right kernel."""
    mutant = mutant_named(name)
    catch = hunt(mutant, tmp_path, seed=1, workers=2, device="cuda", budget_s=BUDGET_S)
    for what in ("cases", "first_seen_s", "shrunk_s"):
        record_property(what, getattr(catch, what))
    record_property("case", encode_case(catch.case).decode())
    assert catch.regression.finding.oracle == mutant.oracle
    found = json.loads(encode_case(catch.case))
    assert {field: found[field] for field in mutant.minimal} == mutant.minimal
    correct, mutated = runner.declarations([mutant.kernel, catch.target])
    assert runner.judge(correct, catch.case).failure is None
    again = runner.judge(mutated, catch.case).failure
    assert again is not None
    assert again.oracle == mutant.oracle


def test_correct_kernels(tmp_path: Path, record_property: Record) -> None:
    """A campaign on a GPU would accuse right kernels, or quietly run on the CPU."""
    summary = tmp_path / "summary.json"
    command = [sys.executable, "-m", "attnfuzz", "explore", "--budget", f"{BUDGET_S}s", "--device", "cuda"]
    command += ["--workers", "4", "--seed", "1", "--save-dir", str(tmp_path / "found"), "--json", str(summary)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * BUDGET_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads(summary.read_text())
    record_property("cases", report["cases"])
    record_property("device", report["device"])
    assert "NVIDIA" in report["device"]
    assert len(report["kernels"]) == NUM_BUNDLED
    assert all(kernel["cases"] > 0 and 0 < kernel["max_error_ratio"] < 1 for kernel in report["kernels"])
