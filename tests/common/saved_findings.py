"""Regression files as campaigns leave them, for tests of what is done with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnfuzz.campaign.saved.replay import SavedCase
from attnfuzz.corpus import Environment, FindingRecord, Regression, write_regression
from attnfuzz.oracles.registry import OracleName
from tests.sample_cases import dense_case

TARGET = "mine.py:mine"


def a_finding(
    length: int,
    *features: str,
    kind: str = "out:value",
    oracle: OracleName = "accuracy",
    kernel: str = TARGET,
    device: str = "",
    failed: int = 0,
    runs: int = 0,
    **fields: Any,
) -> Regression:
    """A finding of one sequence of ``length`` tokens that needs ``features``."""
    case = dense_case(seq_lens=(length,), dtype=fields.pop("dtype", "float32"))
    record = FindingRecord(
        oracle=oracle,
        message=f"wrong for {length} tokens",
        kind=kind,
        features=tuple(sorted(features)),
        failed=failed,
        runs=runs,
    )
    environment = Environment(device=device)
    return Regression(
        problem="dense_decode", kernel=kernel, case=case, finding=record, environment=environment, **fields
    )


def save(folder: Path, regression: Regression) -> SavedCase:
    """The regression, written into ``folder``."""
    return SavedCase(write_regression(regression, folder), regression)
