"""Which runs of a call are told to be over."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from attnfuzz.isolation import progress
from attnfuzz.isolation.progress import expect_runs, run_is_over
from attnfuzz.judging.judge import judge
from attnfuzz.problems.cases import DenseDecodeCase
from tests.unit.limited_kernels import sometimes_with_assembly as eager_kernel

CASE = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(3, 2), scale=0.25, dtype="float32")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    found: list[int] = []
    monkeypatch.setattr(progress, "_LEAST_S", 0.0)
    expect_runs(lambda: found.append(os.getpid()))
    yield found
    expect_runs(None)


def test_runs_of_a_relation_are_told_one_by_one(told: list[int]) -> None:
    """All runs of a relation would share the time of one, and a slow kernel be told to hang."""
    assert judge(eager_kernel, CASE, device="cpu", relations=()).failure is None
    assert len(told) == 2
    assert judge(eager_kernel, CASE, device="cpu", relations="all").failure is None
    assert len(told) > 8


def test_only_long_runs_of_this_process_are_told(told: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The search would wake up for each of a thousand runs a second, or believe what a kernel's child says."""
    run_is_over()
    monkeypatch.setattr(progress, "_LEAST_S", 1e9)
    run_is_over()
    assert len(told) == 1
    monkeypatch.setattr(progress, "_LEAST_S", 0.0)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    run_is_over()
    assert len(told) == 1


def test_a_lost_channel_is_no_error_of_the_kernel() -> None:
    """A kernel would be told to raise what the loss of its process's channel raises."""

    def lost() -> None:
        raise BrokenPipeError

    expect_runs(lost)
    try:
        assert judge(eager_kernel, CASE, device="cpu", relations=()).failure is None
    finally:
        expect_runs(None)
