"""attnfuzz.report.summary: the JSON summary has the documented fields and nothing that JSON cannot say."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from attnfuzz.campaign.declaration_inference import Inferred, LeftOut
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import CampaignResult, Earlier
from attnfuzz.campaign.statistics import WorkerProgress
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.supports import Supports
from attnfuzz.report.summary import write_summary
from attnfuzz.verdict import Failure
from tests.common.report_results import statistics_of

KERNEL = Declaration(name="k", problem="dense_decode", target="kernels.py:k")
OTHER = Declaration(name="other", problem="dense_decode", target="other")
CASE = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(1,), scale=0.25)
FAILURE = Failure(oracle="accuracy", kind="out:nan", message="NaN")


def a_result(*findings: Finding) -> CampaignResult:
    statistics = statistics_of([KERNEL, OTHER], *findings)
    statistics.kernels[KERNEL.target].add(
        WorkerProgress(kernel=KERNEL.target, cases=10, seconds=2.0, max_error_ratio=0.5)
    )
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
                "target": "kernels.py:k",
                "problem": "dense_decode",
                "cases": 10,
                "max_error_ratio": 0.5,
                "findings": [
                    {
                        "oracle": "accuracy",
                        "cause": "accuracy/out:nan",
                        "in_contract": True,
                        "cases_seen": 1,
                        "hash": finding.tag,
                        "signature": "accuracy/out:nan",
                        "entry": 1,
                        "first_seen_s": 1.235,
                        "shrunk_s": 4.0,
                        "path": "regressions/a.json",
                        "message": "NaN",
                    }
                ],
            },
            {
                "name": "other",
                "target": "other",
                "problem": "dense_decode",
                "cases": 0,
                "max_error_ratio": 0.0,
                "findings": [],
            },
        ],
        "compiling": 0.0,
        "unreached": ["other"],
        "remarks": [
            {"weight": "unjudged", "text": "1 kernel was never reached: other; raise --budget", "targets": ["other"]}
        ],
    }


def test_how_a_campaign_began_is_told(tmp_path: Path) -> None:
    """Nobody could see in a CI whether its minutes go into cases."""
    result = a_result()
    statistics = result.statistics
    for at_s in (59.0, 61.0):
        statistics.started = time.monotonic() - at_s
        statistics.add(WorkerProgress(kernel=KERNEL.target, cases=5, seconds=2.0, compile_s=1.0, max_error_ratio=0.5))
    document = written(result, tmp_path)
    assert (round(document["first_case_s"]), document["first_minute"], document["compiling"]) == (59, 5, 0.333)


def test_what_was_cut_off_or_not_saved_is_null(tmp_path: Path) -> None:
    """A time or path made up for it would be a lie."""
    finding = Finding("0-1", KERNEL, CASE, FAILURE, first_seen_s=1.0)
    (entry,) = written(a_result(finding), tmp_path)["kernels"][0]["findings"]
    assert (entry["shrunk_s"], entry["path"]) == (None, None)


def test_what_may_be_another_finding_says_so(tmp_path: Path) -> None:
    """A script that counts bugs would count one twice whenever time runs out."""
    cut = Finding("0-1", KERNEL, CASE, FAILURE, first_seen_s=1.0)
    shrunk = Finding("0-2", KERNEL, CASE, FAILURE, first_seen_s=1.0, shrunk_s=2.0)
    (entry,) = written(a_result(cut, shrunk), tmp_path)["kernels"][0]["findings"]
    assert (entry["shrunk_s"], entry["undecided"]) == (2.0, 1)


def test_a_flaky_finding_tells_its_rate(tmp_path: Path) -> None:
    """Whoever reads it by program must not take it for one that can be bisected."""
    finding = Finding("0-1", KERNEL, CASE, FAILURE, first_seen_s=1.0, failed=3, runs=20)
    (entry,) = written(a_result(finding), tmp_path)["kernels"][0]["findings"]
    assert (entry["failed"], entry["runs"]) == (3, 20)


def test_what_does_not_count_says_so(tmp_path: Path) -> None:
    """A script that takes every finding for a bug would fail where the command does not."""
    refusal = msgspec.structs.replace(FAILURE, oracle="exception", kind="ValueError in k")
    outside = Finding("0-1", KERNEL, CASE, refusal, first_seen_s=1.0, remedy=Supports(empty_sequences=False))
    known = Finding("0-2", KERNEL, CASE, msgspec.structs.replace(FAILURE, oracle="crash"), first_seen_s=1.0)
    result = a_result(outside, known)
    result.statistics.against = Earlier("a.json", frozenset({("target", KERNEL.target, "cause", known.cause)}))
    entries = written(result, tmp_path)["kernels"][0]["findings"]
    assert [(one["oracle"], one["in_contract"], one.get("known", False)) for one in entries] == [
        ("crash", True, True),
        ("exception", False, False),
    ]
    result.statistics.pedantic = True
    assert all(one["in_contract"] for one in written(result, tmp_path)["kernels"][0]["findings"])


def test_what_only_an_author_can_say_is_a_question(tmp_path: Path) -> None:
    """A script would count it among the findings, or never learn which declaration answers it."""
    asked = Finding("0-1", KERNEL, CASE, FAILURE, first_seen_s=1.0, remedy=Supports(strides="contiguous"))
    asked.path = Path("regressions/a.json")
    result = a_result(asked)
    told = written(result, tmp_path)["kernels"][0]
    assert told["questions"] == [
        {
            "field": "strides",
            "declaration": 'Supports(strides="contiguous")',
            "path": "regressions/a.json",
            "message": FAILURE.message,
        }
    ]
    assert told["findings"] == []
    assert not result.fails
    result.statistics.verifying = True
    told = written(result, tmp_path)["kernels"][0]
    assert (len(told["findings"]), "questions" in told, result.fails) == (1, False, True)


def test_what_was_not_searched_is_told(tmp_path: Path) -> None:
    """Nothing found would be taken for all that the declaration promises, on every device."""
    result = a_result()
    left_out = LeftOut("strides", "contiguous", ("q",), "raises", "it raised")
    inferred = Inferred(OTHER.target, Supports(strides="contiguous"), (left_out,), probes=9, works=True)
    result = replace(result, inferred=(inferred,))
    result.statistics.kernels[OTHER.target].not_runnable["no inline assembly"] = 3
    first, other = written(result, tmp_path)["kernels"]
    assert not {"inferred", "outside_contract", "not_runnable"} & set(first)
    assert other["inferred"] == 'Supports(strides="contiguous")'
    assert other["outside_contract"] == str(inferred)
    assert other["not_runnable"] == {"no inline assembly": 3}


def test_the_kernel_with_the_worst_finding_comes_first(tmp_path: Path) -> None:
    """All reports of a campaign have one order."""
    near = Finding("0-1", KERNEL, CASE, msgspec.structs.replace(FAILURE, error_ratio=1.1), first_seen_s=1.0)
    crash = Finding("0-2", OTHER, CASE, msgspec.structs.replace(FAILURE, oracle="crash"), first_seen_s=2.0)
    assert [kernel["name"] for kernel in written(a_result(near, crash), tmp_path)["kernels"]] == ["other", "k"]
