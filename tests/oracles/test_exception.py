"""Exceptions raised by kernels, and results that are none."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from attnfuzz.judging.judge import judge
from attnfuzz.oracles.exception import EnvironmentProblem
from attnfuzz.problems.cases import Case, DenseDecodeCase
from tests.common import limited_kernels


def raise_index_error(inputs: Any) -> None:
    raise IndexError("page 3 is out of range\nand more lines")


def test_exception_is_named_with_its_place(plant: Any, dense: Case, failure_of: Any) -> None:
    """An engineer would not learn what was raised or where."""
    failure = failure_of(plant(before=raise_index_error), dense)
    assert (failure.oracle, failure.kind) == ("exception", "IndexError in raise_index_error")
    line = raise_index_error.__code__.co_firstlineno + 1
    assert failure.message == f"the kernel raised IndexError: page 3 is out of range ({__file__}:{line})"
    assert failure.raised_at is not None
    assert failure.raised_at.line == line
    assert any("and more lines" in detail for detail in failure.details)


def test_an_assertion_without_words_is_told_by_its_line(plant: Any, dense: Case, failure_of: Any) -> None:
    """Of an assertion about a dtype, an engineer would read "AssertionError" and nothing else."""

    message = failure_of(plant(before=limited_kernels.expect_int64), dense).message
    assert message.startswith("the kernel raised AssertionError: assert inputs.seq_lens.dtype == torch.int64 (")


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
        (lambda out, lse: (out[..., :3], lse), "the kernel returned out of shape (3, 4, 3); it must be (3, 4, 8)"),
        (lambda out, lse: (out, lse.T), "the kernel returned lse transposed, of shape (4, 3); it must be (3, 4)"),
        (lambda out, lse: (out.half(), lse), "the kernel returned out in float16; inputs.out is float32, return that"),
        (lambda out, lse: (lse, out), "the kernel returned (lse, out), by their shapes; it must return (out, lse)"),
        (
            lambda out, lse: {"out": out, "lse": lse},
            "the kernel returned a dict of out, lse; it must return (out, lse), only out, or None after writing into "
            "inputs.out and inputs.lse",
        ),
        (
            lambda out, lse: (out, lse.double()),
            "the kernel returned lse in float64; inputs.lse is float32, return that",
        ),
        (lambda out, lse: (out, lse, lse), "the kernel returned tuple of 3; it must return (out, lse)"),
        (lambda out, lse: 7, "the kernel returned 7; it must return (out, lse)"),
        (lambda out, lse: (out, 7), "the kernel returned 7 as lse; it must be a tensor"),
        (lambda out, lse: (out.to("meta"), lse), "the kernel returned out on meta; it must be on cpu"),
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

    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB"),
            RuntimeError("Triton Error [CUDA]: out of memory"),
            RuntimeError("Triton Error [HIP]:  Code: 2, Messsage: out of memory"),
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        ],
    )
    def test_exhausted_memory_is_an_exception_that_ends_the_process(
        self, error: RuntimeError, plant: Any, dense: Case
    ) -> None:
        """What the kernel still holds would fail the cases after it, and what others held be taken for its bug."""

        def exhaust(inputs: Any) -> None:
            raise error

        verdict = judge(plant(before=exhaust), dense, device="cpu")
        assert verdict.fatal
        assert verdict.failure is not None
        assert (verdict.failure.oracle, verdict.failure.kind) == ("exception", "OutOfMemoryError in exhaust")


interpreted = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="this run compiles kernels for a GPU")
LIMITED_CASE = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(3,), scale=0.25, dtype="float32")


@interpreted
@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("with_assembly", "inline_asm"),
        ("with_wrapped_constant", "it does not wrap constants"),
        ("with_driver", "there is no GPU: 0 active drivers"),
    ],
)
def test_what_the_interpreter_lacks_is_no_failure(name: str, lacking: str) -> None:
    """A correct kernel would be accused of what only a CPU's stand-in for the compiler cannot do."""
    verdict = judge(getattr(limited_kernels, name), LIMITED_CASE, device="cpu")
    assert verdict.failure is None
    assert verdict.not_runnable.startswith("Triton's interpreter cannot run this kernel: ")
    assert lacking in verdict.not_runnable


@interpreted
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("with_unknown_name", "AttributeError in unknown_name"),
        ("with_unknown_attribute", "AttributeError in unknown_attribute"),
        ("with_odd_range", "ValueError in odd_range"),
        ("with_endless_loop", "ValueError in endless_loop"),
        ("with_static_assertion", "AssertionError in static_assertion"),
        ("with_absent_axis", "ValueError in absent_axis"),
        ("with_not_implemented", "NotImplementedError in not_implemented"),
        ("with_pretended_limit", "AttributeError in pretended_limit"),
        ("with_missing_key", "KeyError in missing_key"),
    ],
)
def test_mistakes_of_a_kernel_are_no_limits_of_the_interpreter(name: str, kind: str, failure_of: Any) -> None:
    """A misspelt name, or an argument that no compiler takes, would be passed over on every CPU."""
    assert failure_of(getattr(limited_kernels, name), LIMITED_CASE).kind == kind


@interpreted
def test_where_kernels_are_compiled_nothing_is_a_limit(monkeypatch: pytest.MonkeyPatch, failure_of: Any) -> None:
    """On a GPU every exception is the kernel's."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert failure_of(limited_kernels.with_assembly, LIMITED_CASE).oracle == "exception"
