"""A campaign on a GPU, from the command line: planted bugs are found and shrunk, correct kernels left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import oracle_of
from attnfuzz.problems.cases import encode_case
from tests.gpu.bundled_cases import BUNDLED
from tests.quality.hunting import flaws, hunt
from tests.quality.mutants import mutant_named

BUDGET_S = 60
"""Enough for each kernel to have been compiled, also beside other tests."""
HUNT_S = 60
"""A hunt ends as soon as its finding has been shrunk; each smaller format has to be compiled for that."""

Record = Callable[[str, object], None]


@pytest.mark.parametrize(
    "name", ["odd_group_size", "v_not_masked", "empty_split_not_written", "merge_both_empty", "fp16_accumulator"]
)
def test_planted_bug(name: str, tmp_path: Path, runner: Runner, record_property: Record) -> None:
    """A bug would be missed on a GPU, reported large, or blamed on a right kernel.

    One worker: while it shrinks the first failure, another would shrink what a relation says of the same bug, and
    --fail-fast cuts off whichever takes longer.
    """
    mutant = mutant_named(name)
    catch = hunt(mutant, tmp_path, seed=1, workers=1, device="cuda", budget_s=HUNT_S)
    for what in ("cases", "first_seen_s", "shrunk_s"):
        record_property(what, getattr(catch, what))
    record_property("case", encode_case(catch.case).decode())
    assert flaws(mutant, catch, runner) == [], catch.told
    (mutated,) = runner.declarations([catch.target])
    oracle = catch.regression.finding.oracle
    again = runner.judge(mutated, catch.case, relations=oracle_of(oracle).relations).failure
    assert again is not None, catch.told
    assert again.oracle == oracle, f"{again.message}\n{catch.told}"


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
    assert {kernel["name"] for kernel in report["kernels"]} == set(BUNDLED)
    for kernel in report["kernels"]:
        assert kernel["cases"] > 0, kernel
        assert 0 < kernel["max_error_ratio"] < 1, kernel
