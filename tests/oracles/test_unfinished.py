"""Results that are not done when a call returns, and results that are no plain tensors."""

from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnfuzz.judging.judge import judge
from attnfuzz.trials import observation
from attnfuzz.trials.observation import ResultError, check_finished


class Subclass(torch.Tensor):
    pass


def in_a_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_result_that_a_thread_writes_later_is_told(dense: Any, plant: Any) -> None:
    """What nobody waits for would be done by the time that somebody looks."""

    def later(inputs: Any, out: torch.Tensor, lse: torch.Tensor) -> Any:
        found, empty = out.clone(), torch.empty_like(out)

        def write() -> None:
            time.sleep(0.02)
            empty.copy_(found)

        in_a_thread(write)
        return empty, lse

    failure = judge(plant(after=later), dense, device="cpu").failure
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("exception", "result")
    assert "written after the kernel had returned, by a thread that it has started" in failure.message


def test_threads_that_write_nothing_are_nobody_s_business(dense: Any, plant: Any) -> None:
    """A kernel that keeps a pool of threads would be accused, or one that waits for its own."""
    stop = threading.Event()

    def pool(inputs: Any) -> None:
        in_a_thread(stop.wait)
        in_a_thread(lambda: None).join()

    try:
        assert judge(plant(before=pool), dense, device="cpu").failure is None
    finally:
        stop.set()


def test_threads_from_before_the_call_are_not_waited_for() -> None:
    """Each case would take a quarter of a second for the pool of another one."""
    stop = threading.Event()
    waiting = in_a_thread(stop.wait)
    check_finished({"out": torch.zeros(1, dtype=torch.float32)}, threading.enumerate())
    assert waiting.is_alive()
    stop.set()


def test_what_a_stream_writes_after_the_current_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the whole device would hide that nobody else does."""
    out = torch.zeros(4, dtype=torch.float32)
    monkeypatch.setattr(observation, "results_of_call", lambda *arguments: {"out": out})
    nothing: Any = SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert observation._after_waiting(nothing, nothing, nothing, None) == {"out": out}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: out.fill_(1.0))
    with pytest.raises(ResultError, match=r"4 elements of out were written after .* by a stream"):
        observation._after_waiting(nothing, nothing, nothing, None)


def test_a_subclass_of_tensor_is_no_result(dense: Any, plant: Any) -> None:
    """It may compute what it holds when it is compared, and never where nobody does."""
    failure = judge(plant(after=lambda i, out, lse: (out.as_subclass(Subclass), lse)), dense, device="cpu").failure
    assert failure is not None
    assert failure.message.startswith("out is a Subclass, a subclass of torch.Tensor")
    parameter = plant(after=lambda i, out, lse: (torch.nn.Parameter(out, requires_grad=False), lse))
    assert judge(parameter, dense, device="cpu").failure is None


def test_a_timer_that_runs_on_after_the_call_is_told_and_stopped(dense: Any, plant: Any) -> None:
    """Its signal would interrupt whatever the process does next, and pass for an error of attnfuzz."""

    def arms(inputs: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 1000.0)

    failure = judge(plant(before=arms), dense, device="cpu").failure
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("exception", "result")
    assert "returned with a timer running (ITIMER_REAL)" in failure.message
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_timers_that_are_stopped_or_others_are_nobody_s_business(dense: Any, plant: Any) -> None:
    """A kernel with a time limit of its own would be accused, or one that is called under that of a test."""

    def limits_itself(inputs: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 1000.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    assert judge(plant(before=limits_itself), dense, device="cpu").failure is None
    signal.setitimer(signal.ITIMER_PROF, 1000.0)
    try:
        assert judge(plant(), dense, device="cpu").failure is None
        assert signal.getitimer(signal.ITIMER_PROF) != (0.0, 0.0)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
