"""Honest cases and regression files, from which hostile ones are made: those of the repository, and drawn ones."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnfuzz.campaign.draw.sampling import derive_seed, run_round
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import PROBLEMS, Case, encode_case
from attnfuzz.strategies import case_lists

ROOT = Path(__file__).resolve().parents[2]

TINY: dict[str, Any] = {
    "format": "attnfuzz.regression/1",
    "problem": "dense_decode",
    "kernel": "dense_naive",
    "case": {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "seq_lens": [2], "scale": 0.25, "dtype": "float32"},
    "finding": {"oracle": "accuracy", "message": "out[0] is wrong", "kind": "out:value"},
    "status": "open",
}
"""A regression that every command takes seconds for at most."""


def drawn(declaration: Declaration, *, seed: int, lists: int = 6) -> list[Case]:
    """Cases that a kernel supports, the same ones for the same seed."""
    found: list[Case] = []

    def keep(cases: Sequence[Case]) -> bool:
        found.extend(cases)
        return True

    strategy = case_lists(
        declaration.problem, length=8, supports=declaration.supports, options=declaration.options
    )  # fmt: skip
    run_round(strategy, keep, seed_value=derive_seed(seed, declaration.name), until=math.inf, max_draws=lists)
    return found


def regression_documents(*, seed: int) -> list[dict[str, Any]]:
    """Regression files as parsed JSON: those that are kept here, and one for each of some drawn cases."""
    kept = [json.loads(path.read_bytes()) for path in sorted((ROOT / "regressions").glob("*.json"))]
    made = [
        {**TINY, "problem": problem, "case": json.loads(encode_case(case)), "note": "drawn"}
        for problem in PROBLEMS
        for case in drawn(Declaration(name=str(problem), problem=problem), seed=seed)
    ]
    return kept + made
