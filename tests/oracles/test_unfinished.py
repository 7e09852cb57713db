"""Results that are not done when a call returns, that are no plain tensors, or have other bits the second time."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.judging.judge import judge
from attnfuzz.problems.cases import Case
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


def test_bits_that_change_between_runs(plant: Any, dense: Case, failure_of: Any) -> None:
    """A race would pass as long as each of its results is accurate."""
    calls = itertools.count()
    failure = failure_of(plant(after=lambda inputs, out, lse: (out * (1 + 2**-23 * next(calls)), lse)), dense)
    assert (failure.oracle, failure.kind) == ("determinism", "out")
    assert "on identical memory" in failure.message


def test_bits_that_change_between_runs_in_a_buffer_that_the_kernel_keeps(
    plant: Any, dense: Case, failure_of: Any
) -> None:
    """Both runs would be looked at in the same memory, as what the last call left there."""
    calls, kept = itertools.count(), dict[str, Tensor]()

    def store(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        return out, kept.setdefault("lse", torch.empty_like(lse)).copy_(lse * (1 + 2**-23 * next(calls)))

    failure = failure_of(plant(after=store), dense)
    assert (failure.oracle, failure.kind) == ("determinism", "lse")


def test_a_nan_is_a_nan_whatever_its_bits(plant: Any, dense: Case, failure_of: Any) -> None:
    """What lies in memory that nobody owns is another NaN each time, and "nan, then nan" would be told of it."""
    calls = itertools.count()

    def spoil(inputs: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        out[-1, 0, 0] = torch.tensor(0x7FC00000 + next(calls), dtype=torch.int32).view(torch.float32)
        return out, lse

    failure = failure_of(plant(after=spoil), msgspec.structs.replace(dense, dtype="float32"))
    assert (failure.oracle, failure.kind) == ("accuracy", "out:nan")


def test_no_promise_no_failure(plant: Any, dense: Case) -> None:
    """A kernel that declares itself nondeterministic, as one with atomics must be, would be reported."""
    calls = itertools.count()
    supports = attnfuzz.Supports(deterministic=False)
    kernel = plant(supports=supports, after=lambda inputs, out, lse: (out * (1 + 2**-23 * next(calls)), lse))
    assert judge(kernel, dense, device="cpu").failure is None


def test_nondeterministic_kernel_is_still_held_to_dead_memory(plant: Any, dense: Case, failure_of: Any) -> None:
    """A kernel that declares itself nondeterministic would be excused from reading past the end."""
    calls = itertools.count()
    kernel = plant(
        supports=attnfuzz.Supports(deterministic=False),
        length=lambda n: n + 1 if n else 0,
        after=lambda inputs, out, lse: (out * (1 + 2**-23 * next(calls)), lse),
    )
    assert failure_of(kernel, dense).oracle == "dead_memory"
