"""What throughput counts, for how long, and on which cores."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnfuzz.bench import throughput
from attnfuzz.bench.plain_loop import run_plain_loop
from attnfuzz.bench.throughput import (
    Measured,
    ThroughputPlan,
    confined_to,
    measure_campaign,
    measure_throughput,
    share_of_cores,
)

CHOSEN_ON_ALL = 64


@pytest.fixture
def campaigns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, str]]:
    """The workers asked for and the GPUs seen by each campaign that is measured."""
    measured: list[tuple[int | None, str]] = []

    def measure(_: Any, *, workers: int | None, environment: dict[str, str], **__: Any) -> Any:
        measured.append((workers, environment.get("CUDA_VISIBLE_DEVICES", "")))
        return SimpleNamespace(
            rate=1.0, result=SimpleNamespace(statistics=SimpleNamespace(workers=workers or CHOSEN_ON_ALL))
        )

    monkeypatch.setattr(throughput, "measure_campaign", measure)
    return measured


def rows(gpus: tuple[str, ...], workers: tuple[int | None, ...] = (1, None)) -> list[Measured]:
    plan = ThroughputPlan(
        kernels=("k",), device="cuda", seconds=1.0, warmup_s=0.0, workers=workers, gpus=gpus, plain_loop=False
    )
    reported: list[Measured] = []
    found = measure_throughput(plan, reported.append)
    assert reported == found
    return found


def test_one_gpu_has_no_more_workers_than_each_of_several(campaigns: list[tuple[int | None, str]]) -> None:
    """Alone, a GPU would be given the CPU cores of all others, and several would seem to scale badly."""
    found = rows(("0", "1", "2", "3"), workers=(None,))
    assert sorted(campaigns, key=lambda one: len(one[1])) == [(16, "0"), (32, "0,1"), (None, "0,1,2,3")]
    assert [row.gpus for row in found] == [1, 2, 4]


def test_a_gpu_has_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hardware threads of the other GPUs' cores would make one GPU alone faster than it is among several."""
    seen: list[tuple[str, set[int]]] = []

    def measure(_: Any, *, environment: dict[str, str], **__: Any) -> Any:
        seen.append((environment["CUDA_VISIBLE_DEVICES"], os.sched_getaffinity(0)))
        return SimpleNamespace(rate=1.0, result=SimpleNamespace(statistics=SimpleNamespace(workers=2)))

    monkeypatch.setattr(throughput, "measure_campaign", measure)
    before = os.sched_getaffinity(0)
    rows(("0", "1"), workers=(None,))
    assert {gpus: len(cores) for gpus, cores in seen} == {"0": max(1, len(before) // 2), "0,1": len(before)}
    assert os.sched_getaffinity(0) == before


def test_without_several_gpus_each_campaign_is_measured_once(campaigns: list[tuple[int | None, str]]) -> None:
    """A machine with one GPU would be measured again for a comparison that it cannot give."""
    rows(("0",))
    rows(())
    assert campaigns == [(1, "0"), (None, "0"), (1, ""), (None, "")]


KERNEL = "attnfuzz.kernels.bundled:merge_states_eager"


def test_a_campaign_is_measured_after_its_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start-up and compilation would count as time in which nothing was judged, or cases of the warm-up as its work."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("attnfuzz.bench.throughput.time.monotonic", lambda: clock.now)
    monkeypatch.setenv("ATTNFUZZ_TEST_MARK", "before")
    statistics: Any = SimpleNamespace(kernels={KERNEL: SimpleNamespace(cases=0)}, cases=0, deadline=1e6)
    deadlines = []

    def campaign(_: Any, reporter: Any) -> Any:
        assert os.environ["ATTNFUZZ_TEST_MARK"] == "during"
        for clock.now, cases in ((30.0, 0), (40.0, 3), (40.9, 5), (41.5, 9), (43.0, 25)):
            statistics.cases = statistics.kernels[KERNEL].cases = cases
            reporter.progress(statistics)
            deadlines.append(statistics.deadline)
        return SimpleNamespace(statistics=statistics)

    monkeypatch.setattr(throughput, "run_campaign", campaign)
    measured = measure_campaign([KERNEL], seconds=2.0, warmup_s=1.0, environment={"ATTNFUZZ_TEST_MARK": "during"})
    assert deadlines == [1e6, *[43.0] * 4]
    assert measured.cases == {KERNEL: 20}
    assert measured.seconds == pytest.approx(43.0 - 40.9)
    assert measured.rate_of([KERNEL]) == measured.rate == pytest.approx(20 / measured.seconds)
    assert measured.rate_of(["another"]) == 0
    assert os.environ["ATTNFUZZ_TEST_MARK"] == "before"


@pytest.mark.night
def test_a_campaign_is_measured() -> None:
    """There would be nothing to put beside the plain loop."""
    measured = measure_campaign([KERNEL], seconds=5.0, warmup_s=1.0, workers=1, device="cpu")
    assert measured.result.statistics.cases > 0
    assert measured.campaign_s == pytest.approx(1.0 + measured.seconds)


@pytest.mark.night
def test_the_plain_loop_judges_cases() -> None:
    """There would be nothing to compare a campaign with."""
    loop = run_plain_loop([KERNEL], device="cpu", seconds=1.0, warmup_s=0.2)
    assert loop.cases > 0
    assert loop.seconds >= 1.0


@pytest.mark.night
def test_a_plain_loop_that_fails_says_why() -> None:
    """A benchmark would show a rate of nothing."""
    with pytest.raises(RuntimeError, match="no_such_kernel"):
        run_plain_loop(["attnfuzz.kernels.bundled:no_such_kernel"], device="cpu", seconds=1.0, warmup_s=0.2)


def fake_system(folder: Path, siblings: dict[int, str]) -> Path:
    for cpu, text in siblings.items():
        (folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("siblings", "expected"),
    [
        ({cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}, {0, 4, 1, 5}),
        ({cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(8)}, {0, 1, 2, 3}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_a_share_is_of_whole_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: dict[int, str], expected: set[int]
) -> None:
    """One thread of each core would be nearly as fast as the whole machine, and scaling would look bad."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert share_of_cores(1, 2, fake_system(tmp_path, siblings)) == expected


def test_everything_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign on all GPUs would be left without some of the cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5})
    assert share_of_cores(4, 4) == {1, 2, 5}
    assert len(share_of_cores(1, 4)) == 1


def test_what_starts_meanwhile_is_confined() -> None:
    """Workers would run on all cores, or everything that follows on a few."""
    before = os.sched_getaffinity(0)
    with confined_to(frozenset([min(before)])):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
