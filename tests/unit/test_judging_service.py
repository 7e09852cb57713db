"""The judging service in this process: its methods and replies."""

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
from attnfuzz.isolation.serve import ExitAfterReply
from attnfuzz.judging.judge import BatchLost
from attnfuzz.judging.messages import (
    BuildReply,
    BuildRequest,
    BuiltReply,
    GrowthReply,
    GrowthRequest,
    JudgeReply,
    JudgeRequest,
    from_wire,
    to_wire,
)
from attnfuzz.judging.service import JudgingService
from attnfuzz.oracles.exception import EnvironmentProblem
from attnfuzz.oracles.registry import DEFAULT_ORACLES
from attnfuzz.problems.cases import DenseDecodeCase, encode_case
from attnfuzz.verdict import Failure, Verdict
from tests.scripts import run_script

KERNELS = Path(__file__).parent / "misbehaving_kernels.py"
CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=8, seq_lens=(3,), scale=0.25)
LEAKING_CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=16, seq_lens=(3,), scale=0.25, dtype="float32")


def request(name: str) -> bytes:
    case = msgspec.Raw(encode_case(CASE))
    return msgspec.json.encode(JudgeRequest(f"{KERNELS}:{name}", [case], DEFAULT_ORACLES, "bound"))


def request_many(name: str) -> bytes:
    cases = [msgspec.Raw(encode_case(msgspec.structs.replace(CASE, seq_lens=(n,)))) for n in (3, 7)]
    return msgspec.json.encode(JudgeRequest(f"{KERNELS}:{name}", cases, DEFAULT_ORACLES, "bound", together=True))


def test_fatal_verdict_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with a lost GPU context would go on."""
    monkeypatch.setattr("attnfuzz.judging.service.judge", lambda *_, **__: Verdict(fatal=True))
    with pytest.raises(ExitAfterReply):
        JudgingService().handle("judge", request("correct"))


def test_environment_problem_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with an unusable environment would get a traceback."""

    def fail(*_: Any, **__: Any) -> Verdict:
        raise EnvironmentProblem("install another NumPy")

    monkeypatch.setattr("attnfuzz.judging.service.judge", fail)
    reply = msgspec.json.decode(JudgingService().handle("judge", request("correct")), type=JudgeReply)
    assert reply == JudgeReply(environment="install another NumPy")


def test_exhausted_memory_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that finds no memory would count as a bug of the framework, and so would every one after it."""

    def fail(*_: Any, **__: Any) -> Verdict:
        raise torch.OutOfMemoryError("CUDA out of memory.\nGPU 0 has a total capacity of 8 GiB")

    monkeypatch.setattr("attnfuzz.judging.service.judge", fail)
    with pytest.raises(ExitAfterReply) as stop:
        JudgingService().handle("judge", request("correct"))
    assert msgspec.json.decode(stop.value.body, type=JudgeReply) == JudgeReply(lost="CUDA out of memory.")


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


def test_lost_batch_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with a lost GPU context would go on, or take the driver's hope for verdicts with it."""

    def fail(*_: Any, **__: Any) -> list[Verdict]:
        raise BatchLost("illegal memory access")

    monkeypatch.setattr("attnfuzz.judging.service.judge_batch", fail)
    with pytest.raises(ExitAfterReply) as stop:
        JudgingService().handle("judge", request_many("correct"))
    assert msgspec.json.decode(stop.value.body, type=JudgeReply) == JudgeReply(lost="illegal memory access")


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
