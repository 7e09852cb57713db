"""Exceptions raised by kernels, and results that are none."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from attnfuzz.oracles.exception import EnvironmentProblem
from attnfuzz.oracles.judge import judge
from attnfuzz.problems.cases import Case


def raise_index_error(inputs: Any) -> None:
    raise IndexError("page 3 is out of range\nand more lines")


def test_exception_is_named_with_its_place(plant: Any, dense: Case, failure_of: Any) -> None:
    """An engineer would not learn what was raised or where."""
    failure = failure_of(plant(before=raise_index_error), dense)
    assert (failure.oracle, failure.kind) == ("exception", "IndexError in raise_index_error")
    line = raise_index_error.__code__.co_firstlineno + 1
    assert failure.message == f"the kernel raised IndexError: page 3 is out of range ({__file__}:{line})"
    assert any("and more lines" in detail for detail in failure.details)


@pytest.mark.parametrize("stop", [SystemExit, KeyboardInterrupt])
def test_attempts_to_end_the_process_are_exceptions(stop: type[BaseException], plant: Any, dense: Case) -> None:
    """A kernel that calls sys.exit would end the service in silence."""

    def end(inputs: Any) -> None:
        raise stop

    verdict = judge(plant(before=end), dense, device="cpu", catch_interrupt=True)
    assert verdict.failure is not None
    assert (verdict.failure.oracle, verdict.failure.kind) == ("exception", f"{stop.__name__} in end")


def test_ctrl_c_is_not_the_kernels(plant: Any, dense: Case) -> None:
    """A user who presses Ctrl-C in a debugging session would be told that the kernel failed."""

    def interrupt(inputs: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(plant(before=interrupt), dense, device="cpu")


def test_exception_in_the_second_run_only(plant: Any, dense: Case, failure_of: Any) -> None:
    """An exception that depends on what dead memory holds would end the service."""

    def check(inputs: Any) -> None:
        if not torch.isnan(inputs.k[0, 5]).any():
            raise ValueError("the padding is not NaN")

    assert failure_of(plant(before=check), dense).kind == "ValueError in check"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda out, lse: (out[..., :3], lse), "out has shape (3, 4, 3); it must have (3, 4, 8)"),
        (lambda out, lse: (out, lse.T), "lse has shape (4, 3); it must have (3, 4)"),
        (lambda out, lse: (out.half(), lse), "out has dtype float16; it must have float32"),
        (lambda out, lse: (out, lse.double()), "lse has dtype float64; it must have float32"),
        (lambda out, lse: (out, lse, lse), "the kernel returned tuple of 3; it must return (out, lse)"),
        (lambda out, lse: 7, "the kernel returned 7; it must return (out, lse)"),
        (lambda out, lse: (out, 7), "the kernel returned 7 as lse; it must be a tensor"),
        (lambda out, lse: (out.to("meta"), lse), "out is on meta; it must be on cpu"),
    ],
)
def test_result_that_is_none(result: Any, message: str, plant: Any, dense: Case, failure_of: Any) -> None:
    """A result of another shape or type would crash the oracles or be broadcast into passing."""
    failure = failure_of(plant(after=lambda inputs, out, lse: result(out, lse)), dense)
    assert (failure.oracle, failure.kind) == ("exception", "result")
    assert failure.message.startswith(message)


class InterpreterError(Exception):
    """As Triton's, which is told by its name."""


def wrap_in_triton_error(inputs: Any) -> None:
    try:
        raise_index_error(inputs)
    except IndexError as error:
        raise InterpreterError(repr(error)) from error


def test_tritons_wrapper_is_looked_through(
    plant: Any, dense: Case, failure_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All failures inside the interpreter would share one signature."""
    monkeypatch.setattr(sys.modules["attnfuzz.oracles.exception"], "interpreter_problem", lambda: None)
    failure = failure_of(plant(before=wrap_in_triton_error), dense)
    assert failure.kind == "IndexError in raise_index_error"
    assert "raised inside Triton as InterpreterError" in failure.details


def test_interpreter_that_cannot_work_is_no_finding(plant: Any, dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel would be reported where Triton's interpreter does not go with the installed NumPy."""
    module = sys.modules["attnfuzz.oracles.exception"]
    monkeypatch.setattr(module, "interpreter_problem", lambda: "Triton 3.6 fails; install an older numpy")
    with pytest.raises(EnvironmentProblem, match="install an older numpy"):
        judge(plant(before=wrap_in_triton_error), dense, device="cpu")


def test_oracle_not_asked_for_stays_silent(plant: Any, dense: Case) -> None:
    """An exception would be reported to a user who asked about accuracy alone."""
    verdict = judge(plant(before=raise_index_error), dense, device="cpu", oracles=("accuracy",))
    assert verdict.failure is None
    assert verdict.error_ratio == 0


class TestCudaErrors:
    """CUDA errors, told by their words; whether the context is lost is told by the next call."""

    @staticmethod
    def fail(inputs: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for `cudaError...'")

    @pytest.mark.parametrize("fail", [fail, raise_index_error])
    def test_lost_context_is_a_fatal_crash(
        self, fail: Any, plant: Any, dense: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The process would go on with a GPU context that fails every later case, whatever the kernel made of it."""

        def lost() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lost)
        verdict = judge(plant(before=fail), dense, device="cpu")
        assert verdict.fatal
        assert verdict.failure is not None
        assert (verdict.failure.oracle, verdict.failure.kind) == ("crash", "cuda:illegal memory access")

    def test_refused_launch_is_an_exception(
        self, plant: Any, dense: Case, failure_of: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An executor would be thrown away for a launch that CUDA merely refused."""
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        assert failure_of(plant(before=self.fail), dense).oracle == "exception"

    def test_exhausted_memory_is_an_exception_that_ends_the_process(self, plant: Any, dense: Case) -> None:
        """What the kernel still holds would fail the cases after it."""

        def exhaust(inputs: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

        verdict = judge(plant(before=exhaust), dense, device="cpu")
        assert verdict.fatal
        assert verdict.failure is not None
        assert (verdict.failure.oracle, verdict.failure.kind) == ("exception", "OutOfMemoryError in exhaust")
