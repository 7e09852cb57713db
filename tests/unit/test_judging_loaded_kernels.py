"""attnfuzz.judging.loaded_kernels: a GPU that stops answering, played by a service, is no kernel that hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnfuzz.declaration import Declaration
from attnfuzz.isolation.outcomes import DeviceLost, ExecutorUnavailable
from attnfuzz.isolation.zygote_client import Zygote
from attnfuzz.judging import loaded_kernels
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import DenseDecodeCase
from tests.unit.execution_clients import SERVICES

KERNEL = Declaration(name="k", problem="dense_decode", target="kernels.py:k")
CASE = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(3,), scale=0.25)


@pytest.fixture
def hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is there once the GPU has hung."""
    monkeypatch.setenv("ATTNFUZZ_TEST_GPU_HUNG", str(tmp_path / "hung"))
    monkeypatch.setattr(loaded_kernels, "_PROBE_TIMEOUT_S", 0.3)
    return tmp_path / "hung"


def test_a_gpu_that_does_not_answer_after_a_hang_is_no_hang_of_the_kernel(hung: Path) -> None:
    """Every case from then on would be a finding, at the price of a minute each."""
    with Zygote.start(service=f"{SERVICES}:DeadGpu", preload=()) as zygote:
        with Runner(device="cuda", zygote=zygote) as dead, pytest.raises(DeviceLost, match=r"kernels\.py:k.*reset it"):
            dead.judge(KERNEL, CASE, timeout_s=0.3)
        assert hung.exists()


def test_the_start_of_a_gpu_does_not_count_against_a_case() -> None:
    """Many processes that start at once wait for each other: their first cases would hang, and they start again."""
    with (
        Zygote.start(service=f"{SERVICES}:ColdGpu", preload=()) as zygote,
        Runner(device="cuda", zygote=zygote) as cold,
        pytest.raises(ExecutorUnavailable, match="the case was judged"),
    ):
        cold.judge(KERNEL, CASE, timeout_s=0.5)


def test_a_process_that_was_asked_what_there_is_starts_the_gpu_before_the_first_case() -> None:
    """Hunts ask each new process for its kernels first: their first case would wait for CUDA, and be a hang."""
    with (
        Zygote.start(service=f"{SERVICES}:ColdGpu", preload=()) as zygote,
        Runner(device="cuda", zygote=zygote) as cold,
    ):
        cold.declarations([KERNEL.target])
        with pytest.raises(ExecutorUnavailable, match="the case was judged"):
            cold.judge(KERNEL, CASE, timeout_s=0.5)


@pytest.mark.parametrize(("kills", "said"), [(8, "the case was judged"), (1000, "something kills every process")])
def test_processes_that_something_kills_say_nothing_about_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, said: str
) -> None:
    """A campaign whose processes are killed while CUDA starts would give up a GPU that works."""
    monkeypatch.setenv("ATTNFUZZ_TEST_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("ATTNFUZZ_TEST_KILLS", str(kills))
    with (
        Zygote.start(service=f"{SERVICES}:KilledAtTheStart", preload=()) as zygote,
        Runner(device="cuda", zygote=zygote) as runner,
        pytest.raises(ExecutorUnavailable, match=said) as error,
    ):
        runner.judge(KERNEL, CASE)
    assert not isinstance(error.value, DeviceLost)


def test_a_batch_with_which_the_gpu_stops_answering_is_not_judged_case_by_case(hung: Path) -> None:
    """It would take a minute for each case to find out what is known already."""
    with (
        Zygote.start(service=f"{SERVICES}:DeadGpu", preload=()) as zygote,
        Runner(device="cuda", zygote=zygote) as dead,
        pytest.raises(DeviceLost),
    ):
        dead.judge_together(KERNEL, [CASE, CASE], timeout_s=0.3)
    assert hung.exists()


def test_a_hang_on_a_gpu_that_goes_on_answering_is_the_kernel_s(hung: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel that hangs would be found any more."""
    monkeypatch.setenv("ATTNFUZZ_TEST_GPU_THEN", "recovers")
    with Zygote.start(service=f"{SERVICES}:DeadGpu", preload=()) as zygote, Runner(device="cuda", zygote=zygote) as one:
        failure = one.judge(KERNEL, CASE, timeout_s=0.3).failure
    assert hung.exists()
    assert failure is not None
    assert failure.oracle == "hang"
