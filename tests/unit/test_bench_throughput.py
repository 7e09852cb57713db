"""Which campaigns are measured, on which GPUs and with how many workers."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from attnfuzz.bench import throughput
from attnfuzz.bench.throughput import Row, ThroughputPlan, measure_throughput

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


def rows(gpus: tuple[str, ...], workers: tuple[int | None, ...] = (1, None)) -> list[Row]:
    plan = ThroughputPlan(
        kernels=("k",), device="cuda", seconds=1.0, warmup_s=0.0, workers=workers, gpus=gpus, plain_loop=False
    )
    reported: list[Row] = []
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
