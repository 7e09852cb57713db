"""On a GPU a campaign draws from formats that have been compiled: far more cases than compilations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

BUDGET_S = 30
SCOUTED_AT_ONCE = 4
"""Formats that a kernel is given before the first case; here no two of them make the same program."""
KERNELS = {"paged_naive": "paged_decode_kernel", "merge_states_triton": "merge_states_kernel"}
"""With the function that Triton compiles for each."""


def explored(folder: Path, *, seed: int, workers: int) -> int:
    """Cases of a campaign over two kernels that keeps what it compiles in ``folder``."""
    summary = folder / f"summary-{seed}.json"
    command = [sys.executable, "-m", "attnfuzz", "explore", *KERNELS, "--device", "cuda"]
    command += ["--budget", f"{BUDGET_S}s", "--workers", str(workers), "--seed", str(seed)]
    command += ["--save-dir", str(folder / "found"), "--json", str(summary)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "triton")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=4 * BUDGET_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    cases: int = json.loads(summary.read_text())["cases"]
    return cases


def compiled(folder: Path, function: str = "*") -> int:
    return len(list((folder / "triton").rglob(f"{function}.cubin")))


def test_cases_outnumber_compilations(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """A format of its own for each case spends a GPU's time in a compiler; a single one meets few bugs.

    How far scouting comes beyond the first formats in these seconds is up to the machine. That it goes on, with its
    share of the time, is tested in `tests/unit/test_campaign_sampling.py`.
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
