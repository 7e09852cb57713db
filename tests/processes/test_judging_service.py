"""What an executor answers, the limits it finds in sources, and GPUs that do not answer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

import attnfuzz
from attnfuzz.declaration import Declaration
from attnfuzz.isolation.outcomes import DeviceLost, ExecutorUnavailable
from attnfuzz.isolation.serve import ExitAfterReply
from attnfuzz.isolation.zygote_client import Zygote
from attnfuzz.judging import loaded_kernels
from attnfuzz.judging.messages import (
    BuildReply,
    BuildRequest,
    BuiltReply,
    DeclarationsReply,
    GrowthReply,
    GrowthRequest,
    JudgeReply,
    JudgeRequest,
    from_wire,
    to_wire,
)
from attnfuzz.judging.runner import Runner
from attnfuzz.judging.service import JudgingService
from attnfuzz.oracles.exception import EnvironmentProblem
from attnfuzz.oracles.registry import DEFAULT_ORACLES
from attnfuzz.problems.cases import DenseDecodeCase, encode_case
from attnfuzz.verdict import Failure, Verdict
from tests.common.execution_clients import SERVICES
from tests.scripts import run_script

KERNELS = Path(__file__).parents[1] / "common" / "misbehaving_kernels.py"
CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=8, seq_lens=(3,), scale=0.25)
LEAKING_CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=16, seq_lens=(3,), scale=0.25, dtype="float32")


def request(name: str) -> bytes:
    case = msgspec.Raw(encode_case(CASE))
    return msgspec.json.encode(JudgeRequest(f"{KERNELS}:{name}", [case], DEFAULT_ORACLES, "bound"))


def test_gpu_lost_after_the_call_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that overwrites the code of what runs next would be an internal error, or blamed on who comes next."""

    def lost(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal instruction was encountered")

    service = JudgingService()
    monkeypatch.setattr("attnfuzz.judging.service.judge", lost)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(ExitAfterReply) as stop:
        service.handle("judge", request("correct"))
    reply = msgspec.json.decode(stop.value.body, type=JudgeReply)
    verdict = from_wire(reply.verdicts[0])
    assert verdict.failure is not None
    assert (verdict.failure.oracle, verdict.failure.kind) == ("crash", "cuda:illegal instruction")
    with pytest.raises(ExitAfterReply) as stop:
        service.handle("judge", request("correct"))
    assert msgspec.json.decode(stop.value.body, type=JudgeReply).lost == verdict.failure.message


def test_environment_problem_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with an unusable environment would get a traceback."""

    def fail(*_: Any, **__: Any) -> Verdict:
        raise EnvironmentProblem("install another NumPy")

    monkeypatch.setattr("attnfuzz.judging.service.judge", fail)
    reply = msgspec.json.decode(JudgingService().handle("judge", request("correct")), type=JudgeReply)
    assert reply == JudgeReply(environment="install another NumPy")


def test_how_full_the_gpu_is_goes_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that leaks GPU memory would be noticed when nothing is left for the next case."""
    monkeypatch.setattr(JudgingService, "device", "cuda")
    monkeypatch.setattr("attnfuzz.judging.service.judge", lambda *_, **__: Verdict())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2 << 30)
    service = JudgingService()
    reply = msgspec.json.decode(service.handle("judge", request("correct")), type=JudgeReply)
    assert reply.gpu_share == pytest.approx(0.25)


def growths(*calls: int) -> list[int]:
    """Mebibytes that the service says its process has after so many calls more."""
    service = JudgingService()
    target = f"{KERNELS.with_name('leaking_kernels.py')}:keeps_16_mebibytes"
    case = msgspec.Raw(encode_case(LEAKING_CASE))
    uses = []
    for count in calls:
        body = service.handle("growth", msgspec.json.encode(GrowthRequest(target, case, count)))
        use = msgspec.json.decode(body, type=GrowthReply).use
        assert use is not None
        uses.append(use.host_bytes >> 20)
    return uses


def test_growth_is_that_of_calls_which_add_up() -> None:
    """Each answer would be about another process's memory, or about no calls at all.

    Red zones around what a kernel allocates, and the inputs of attnfuzz, are not its leak.
    """
    # In a process of its own, as executors are: from this one goes what earlier tests have left.
    script = f"import runpy; print(runpy.run_path({__file__!r})['growths'](1, 6, 3))"
    uses = json.loads(run_script(script).stdout)
    assert uses[1] - uses[0] == pytest.approx(6 * 16, abs=3)
    assert uses[2] - uses[1] == pytest.approx(3 * 16, abs=3)


def test_a_kernel_that_raises_has_no_growth() -> None:
    """What it raises is for another oracle to say, and no error of the service."""
    target = f"{KERNELS.with_name('leaking_kernels.py')}:raises"
    case = msgspec.Raw(encode_case(LEAKING_CASE))
    body = JudgingService().handle("growth", msgspec.json.encode(GrowthRequest(target, case, 1)))
    assert msgspec.json.decode(body, type=GrowthReply) == GrowthReply(raised="ValueError: no such block")


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1e300, math.inf])
def test_verdicts_survive_the_wire(ratio: float) -> None:
    """A verdict would come back with another ratio, or not at all."""
    failure = Failure(oracle="accuracy", kind="out:nan", message="m", details=("d",), error_ratio=ratio)
    verdict = Verdict(failure=failure, error_ratio=ratio)
    sent = msgspec.json.encode(to_wire(verdict))
    assert from_wire(msgspec.json.decode(sent, type=Verdict)) == verdict


class PretendedBuilder:
    """Notes what calls need: here each call is asked for, and names what it was called with."""

    modules, setting, folder, keeps_apart = "modules of Engine", "ENGINE_FOLDER", "/kept", True
    built, is_over = 1, True

    def begin(self, calls: Sequence[Callable[[], object]]) -> list[list[str]]:
        for call in calls:
            call()
        return [["decode"] for _ in calls]


def test_an_engines_builder_is_asked_with_calls_on_the_cases() -> None:
    """Which modules a kernel needs follows from its inputs; without them nothing could be built beforehand."""
    seen = list[Any]()
    engine = attnfuzz.Engine("torch", tried=("1",), builder=PretendedBuilder())

    def decode(inputs: Any, *, mul: Any) -> None:
        seen.append((inputs.q.shape, mul))

    kernel: Any = engine.kernel("dense_decode", supports=attnfuzz.Supports(), needs={"mul": ("torch:mul",)})(decode)
    assert kernel.declaration.builds_apart
    service = JudgingService()
    service._kernels["mine.py:decode"] = kernel
    asked = BuildRequest([("mine.py:decode", msgspec.Raw(encode_case(CASE)))])
    reply = msgspec.json.decode(service.handle("build", msgspec.json.encode(asked)), type=BuildReply)
    assert reply == BuildReply([["decode"]], "modules of Engine", "/kept", "ENGINE_FOLDER")
    assert seen == [((1, 2, 8), torch.mul)]
    assert msgspec.json.decode(service.handle("built", b"{}"), type=BuiltReply) == BuiltReply(1, is_over=True)


SOURCE = """
import attnfuzz

TILE = 96
UNUSED = 777
LIMIT = 1 << 11


def elsewhere(n):
    return n >= 333


def split(n):
    for start in range(0, n, 80):
        yield start


@attnfuzz.kernel("paged_decode")
def limited(inputs):
    for n in inputs.seq_lens.tolist():
        if n >= LIMIT or n // TILE > 3:
            return None
        list(split(n))
    return inputs.out


@attnfuzz.kernel("paged_decode")
def another(inputs):
    configuration = dict(block_n=48 if inputs.max_seq_len else 24)
    return configuration


made = attnfuzz.kernel("paged_decode", name="made")(eval("lambda inputs: inputs.seq_lens > 555"))
"""


def lengths(folder: Path) -> dict[str, tuple[int, ...]]:
    """As the search is told of the kernels of a file."""
    file = folder / "kernels_with_limits.py"
    file.write_text(SOURCE)
    payload = msgspec.json.encode({"targets": [str(file)]})
    reply = msgspec.json.decode(JudgingService().handle("declarations", payload), type=DeclarationsReply)
    assert reply.error is None
    return {kernel.name: kernel.lengths for kernel in reply.kernels}


def test_a_search_is_told_the_limits_of_each_kernel_and_of_no_other(tmp_path: Path) -> None:
    """Lengths would not be drawn around what a kernel compares them with, or around limits of its neighbours."""
    found = lengths(tmp_path)
    assert found["limited"] == (80, 96, 2048)
    assert found["another"] == (24, 48)


def test_a_kernel_without_source_has_no_limits(tmp_path: Path) -> None:
    """What is made at run time could not be searched at all."""
    assert lengths(tmp_path)["made"] == ()


def test_what_triton_kernels_are_launched_with_counts() -> None:
    """The tile of a kernel would be met by chance only, where no option names it."""
    payload = msgspec.json.encode({"targets": ["paged_attention_auto"]})
    reply = msgspec.json.decode(JudgingService().handle("declarations", payload), type=DeclarationsReply)
    assert 128 in reply.kernels[0].lengths


def test_sources_of_kernels_that_are_known_are_not_read_again() -> None:
    """Each worker would do so before its first case, which takes longer than importing an engine's kernels."""
    payload = msgspec.json.encode({"targets": ["paged_attention_auto"], "known": True})
    reply = msgspec.json.decode(JudgingService().handle("declarations", payload), type=DeclarationsReply)
    assert reply.kernels[0].lengths == ()


KERNEL = Declaration(name="k", problem="dense_decode", target="kernels.py:k")
ONE_HEAD = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(3,), scale=0.25)


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
            dead.judge(KERNEL, ONE_HEAD, timeout_s=0.3)
        assert hung.exists()


def test_the_start_of_a_gpu_does_not_count_against_a_case() -> None:
    """Many processes that start at once wait for each other: their first cases would hang, and they start again."""
    with (
        Zygote.start(service=f"{SERVICES}:ColdGpu", preload=()) as zygote,
        Runner(device="cuda", zygote=zygote) as cold,
        pytest.raises(ExecutorUnavailable, match="the case was judged"),
    ):
        cold.judge(KERNEL, ONE_HEAD, timeout_s=0.5)


def test_a_process_that_was_asked_what_there_is_starts_the_gpu_before_the_first_case() -> None:
    """Hunts ask each new process for its kernels first: their first case would wait for CUDA, and be a hang."""
    with (
        Zygote.start(service=f"{SERVICES}:ColdGpu", preload=()) as zygote,
        Runner(device="cuda", zygote=zygote) as cold,
    ):
        cold.declarations([KERNEL.target])
        with pytest.raises(ExecutorUnavailable, match="the case was judged"):
            cold.judge(KERNEL, ONE_HEAD, timeout_s=0.5)


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
        runner.judge(KERNEL, ONE_HEAD)
    assert not isinstance(error.value, DeviceLost)


def test_a_batch_with_which_the_gpu_stops_answering_is_not_judged_case_by_case(hung: Path) -> None:
    """It would take a minute for each case to find out what is known already."""
    with (
        Zygote.start(service=f"{SERVICES}:DeadGpu", preload=()) as zygote,
        Runner(device="cuda", zygote=zygote) as dead,
        pytest.raises(DeviceLost),
    ):
        dead.judge_together(KERNEL, [ONE_HEAD, ONE_HEAD], timeout_s=0.3)
    assert hung.exists()


def test_a_hang_on_a_gpu_that_goes_on_answering_is_the_kernel_s(hung: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel that hangs would be found any more."""
    monkeypatch.setenv("ATTNFUZZ_TEST_GPU_THEN", "recovers")
    with Zygote.start(service=f"{SERVICES}:DeadGpu", preload=()) as zygote, Runner(device="cuda", zygote=zygote) as one:
        failure = one.judge(KERNEL, ONE_HEAD, timeout_s=0.3).failure
    assert hung.exists()
    assert failure is not None
    assert failure.oracle == "hang"
