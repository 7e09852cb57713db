"""A campaign on a GPU, from the command line: planted bugs are found, and few formats are compiled for many cases."""

from __future__ import annotations

import json
import os
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


SECONDS = 30
SCOUTED_AT_ONCE = 4
"""Formats that a kernel is given before the first case; here no two of them make the same program."""
KERNELS = {"paged_naive": "paged_decode_kernel", "merge_states_triton": "merge_states_kernel"}
"""With the function that Triton compiles for each."""


def explored(folder: Path, *, seed: int, workers: int) -> int:
    """Cases of a campaign over two kernels that keeps what it compiles in ``folder``."""
    summary = folder / f"summary-{seed}.json"
    command = [sys.executable, "-m", "attnfuzz", "explore", *KERNELS, "--device", "cuda"]
    command += ["--budget", f"{SECONDS}s", "--workers", str(workers), "--seed", str(seed)]
    command += ["--save-dir", str(folder / "found"), "--json", str(summary)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "triton")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=4 * SECONDS)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    cases: int = json.loads(summary.read_text())["cases"]
    return cases


def compiled(folder: Path, function: str = "*") -> int:
    return len(list((folder / "triton").rglob(f"{function}.cubin")))


def test_cases_outnumber_compilations(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """A format of its own for each case spends a GPU's time in a compiler; a single one meets few bugs.

    How far scouting comes beyond the first formats in these seconds is up to the machine. That it goes on, with its
    share of the time, is tested in `tests/campaign/test_sampling.py`.
    """
    first_cases = explored(tmp_path, seed=1, workers=2)
    first_compiled = compiled(tmp_path)
    second_cases = explored(tmp_path, seed=2, workers=2)
    second_compiled = compiled(tmp_path) - first_compiled
    record_property("cases", (first_cases, second_cases))
    record_property("compiled", (first_compiled, second_compiled))
    programs = {function: compiled(tmp_path, function) for function in KERNELS.values()}
    assert min(programs.values()) >= SCOUTED_AT_ONCE, programs
    assert 4 * first_compiled < first_cases
    assert 4 * second_compiled < second_cases
