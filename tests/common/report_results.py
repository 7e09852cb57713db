"""Results of campaigns for tests of reports: cases counted as a worker does it, without running any kernel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import CampaignResult, Statistics
from attnfuzz.campaign.statistics import ProgressMeter, WorkerProgress
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case, MergeStatesCase
from attnfuzz.problems.recipes import Needle, Pages, Values
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Blame, Cause, Failure, Timing, Verdict
from tests.sample_cases import dense_case, paged_case

PAGED = Declaration(
    name="paged",
    problem="paged_decode",
    target="my kernels.py:paged",
    supports=Supports(head_sizes=(16, 64), layouts=("NHD", "HND")),
    options={"tile": (16, 32)},
)
DENSE = Declaration(name="dense", problem="dense_decode", target="dense")
MERGE = Declaration(name="merge", problem="merge_states", target="merge")

CASES: dict[str, Case] = {
    PAGED.target: paged_case(
        num_q_heads=4,
        head_size=64,
        scale=0.125,
        block_size=16,
        seq_lens=(17, 0, 40),
        values=Values(needles=(Needle(2, 39, 0),)),
        pages=Pages(order="shuffled", spare_blocks=2, extra_columns=1, seed=3),
        options={"tile": 16},
    ),
    DENSE.target: dense_case(num_q_heads=2, seq_lens=(3, 1), extra_rows=2),
    MERGE.target: MergeStatesCase(num_q_heads=2, head_size=16, num_tokens=2, lse_pairs=(("finite", "-inf"),)),
}


def a_finding(declaration: Declaration = PAGED, **fields: Any) -> Finding:
    failure = Failure(
        oracle="accuracy",
        kind="out:value",
        message="out[seq 0, head 3, dim 5] = 16.0, expected 15.0 <b>not markup</b>",
        details=("token 16 (page 1, offset 0) of sequence 0 is dropped",),
        error_ratio=412.0,
        tensor="out",
        causes=(Cause(mistake="tokens_dropped"),),
        blame=Blame(tokens=((0, 16),), seqs=(0,), rows=((0, 3),)),
    )
    base: dict[str, Any] = {
        "failure": failure,
        "first_seen_s": 3.0,
        "failed": 3,
        "runs": 3,
        "shrunk_s": 6.0,
        "steps": 24,
        "path": Path("a folder/a.json"),
    }
    return Finding("0-1", declaration, CASES[declaration.target], **(base | fields))


def statistics_of(kernels: Sequence[Declaration], *findings: Finding, seconds: int = 60, left: int = 0) -> Statistics:
    """Of a campaign that has run for so many ``seconds``, without any case yet."""
    now = time.monotonic()
    return Statistics(
        kernels=Statistics.of_kernels(kernels),
        started=now - seconds,
        deadline=now + left,
        device="cpu",
        device_name="a processor",
        workers=2,
        seed=7,
        findings=list(findings),
    )


def a_result(*findings: Finding, devices: tuple[str, ...] = ("",), **fields: Any) -> CampaignResult:
    """A minute of three kernels, ten cases of each on each of ``devices``, all of them the same; none of MERGE."""
    statistics = statistics_of([PAGED, DENSE, MERGE], *findings)
    timing = Timing(compile_s=0.01, kernel_s=0.05, reference_s=0.02, build_s=0.01)
    for device in devices:
        reports: list[WorkerProgress] = []
        tally = ProgressMeter(reports.append, clock=lambda: 0.0, device=device)
        for declaration in (PAGED, DENSE):
            for i in range(10):
                verdict = Verdict(error_ratio=(0.0, 0.5, 1.0)[i % 3], timing=timing)
                tally.judged(declaration, CASES[declaration.target], 0.1, verdict)
        tally.judged(PAGED, CASES[PAGED.target], 0.1, Verdict(error_ratio=40.0))
        tally.flush()
        for report in reports:
            statistics.add(report)
    base: dict[str, Any] = {"stop_reason": "budget", "elapsed_s": 60.0, "statistics": statistics, "findings": findings}
    return CampaignResult(**(base | fields))
