"""attnfuzz.report.summary: the JSON summary has the documented fields and nothing that JSON cannot say."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.messages import Progress
from attnfuzz.campaign.result import CampaignResult, Statistics
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.report.summary import write_summary

KERNEL = Declaration(name="k", problem="dense_decode", target="kernels.py:k")
OTHER = Declaration(name="other", problem="dense_decode", target="other")
CASE = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(1,), scale=0.25)
FAILURE = Failure(oracle="accuracy", kind="out:nan", message="NaN")


def a_result(*findings: Finding) -> CampaignResult:
    now = time.monotonic()
    statistics = Statistics(
        kernels=Statistics.of_kernels([KERNEL, OTHER]),
        started=now - 60,
        deadline=now,
        device="cpu",
        device_name="a processor",
        workers=2,
        seed=7,
        findings=list(findings),
    )
    statistics.kernels[KERNEL.target].add(Progress(kernel=KERNEL.target, cases=10, seconds=2.0, max_error_ratio=0.5))
    return CampaignResult(stop_reason="budget", elapsed_s=60.1234, statistics=statistics, findings=findings)


def written(result: CampaignResult, folder: Path) -> dict[str, Any]:
    write_summary(result, folder / "summary.json")
    document: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return document


def test_the_summary_has_exactly_the_documented_fields(tmp_path: Path) -> None:
    """Scripts of other people read these names."""
    finding = Finding("0-1", KERNEL, CASE, FAILURE, first_seen_s=1.23456, shrunk_s=4.0, path=Path("regressions/a.json"))
    assert written(a_result(finding), tmp_path) == {
        "format": "attnfuzz.summary/1",
        "stop_reason": "budget",
        "elapsed_s": 60.123,
        "cases": 10,
        "device": "a processor",
        "kernels": [
            {
                "name": "k",
                "problem": "dense_decode",
                "cases": 10,
                "max_error_ratio": 0.5,
                "findings": [
                    {
                        "oracle": "accuracy",
                        "signature": "accuracy/out:nan [any case]",
                        "first_seen_s": 1.235,
                        "shrunk_s": 4.0,
                        "path": "regressions/a.json",
                        "message": "NaN",
                    }
                ],
            },
            {"name": "other", "problem": "dense_decode", "cases": 0, "max_error_ratio": 0.0, "findings": []},
        ],
        "unreached": ["other"],
    }


def test_what_was_cut_off_or_not_saved_is_null(tmp_path: Path) -> None:
    """A time or path made up for it would be a lie."""
    finding = Finding("0-1", KERNEL, CASE, FAILURE, first_seen_s=1.0)
    (entry,) = written(a_result(finding), tmp_path)["kernels"][0]["findings"]
    assert (entry["shrunk_s"], entry["path"]) == (None, None)


def test_a_flaky_finding_tells_its_rate(tmp_path: Path) -> None:
    """Whoever reads it by program must not take it for one that can be bisected."""
    finding = Finding("0-1", KERNEL, CASE, FAILURE, first_seen_s=1.0, failed=3, runs=20)
    (entry,) = written(a_result(finding), tmp_path)["kernels"][0]["findings"]
    assert (entry["failed"], entry["runs"]) == (3, 20)
