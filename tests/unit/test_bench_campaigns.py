"""attnfuzz.bench.throughput and plain_loop: what is counted, and for how long."""

from __future__ import annotations

import os

import pytest

from attnfuzz.bench.plain_loop import run_plain_loop
from attnfuzz.bench.throughput import measure_campaign

KERNEL = "attnfuzz.kernels.bundled:merge_states_eager"


def test_a_campaign_is_measured_after_its_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start-up and compilation would count as time in which nothing was judged, or cases of the warm-up as its work."""
    monkeypatch.setenv("ATTNFUZZ_TEST_MARK", "before")
    measured = measure_campaign(
        [KERNEL], seconds=2.0, warmup_s=1.0, workers=1, device="cpu", environment={"ATTNFUZZ_TEST_MARK": "during"}
    )
    assert 0 < measured.cases[KERNEL] < measured.result.statistics.cases
    assert measured.seconds == pytest.approx(2.0, abs=1.0)
    assert measured.rate == pytest.approx(measured.cases[KERNEL] / measured.seconds)
    assert measured.rate_of([KERNEL]) == measured.rate
    assert measured.rate_of(["another"]) == 0
    assert os.environ["ATTNFUZZ_TEST_MARK"] == "before"


def test_the_plain_loop_judges_cases() -> None:
    """There would be nothing to compare a campaign with."""
    loop = run_plain_loop([KERNEL], device="cpu", seconds=1.0, warmup_s=0.2)
    assert loop.cases > 0
    assert loop.seconds >= 1.0


def test_a_plain_loop_that_fails_says_why() -> None:
    """A benchmark would show a rate of nothing."""
    with pytest.raises(RuntimeError, match="no_such_kernel"):
        run_plain_loop(["attnfuzz.kernels.bundled:no_such_kernel"], device="cpu", seconds=1.0, warmup_s=0.2)
