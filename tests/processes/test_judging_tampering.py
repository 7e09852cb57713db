"""What kernels replace in the process that judges them is seen; what changes by itself is not."""

from __future__ import annotations

import errno
import gc
import resource
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from attnfuzz.isolation.serve import ExitAfterReply
from attnfuzz.judging import service as judging_service
from attnfuzz.judging.messages import (
    DeclarationsReply,
    DeclarationsRequest,
    ExplainReply,
    ExplainRequest,
    JudgeReply,
    JudgeRequest,
    LinesRequest,
)
from attnfuzz.judging.service import JudgingService
from attnfuzz.judging.tampering import Watch
from attnfuzz.oracles.registry import DEFAULT_ORACLES
from attnfuzz.problems.cases import DenseDecodeCase, encode_case
from attnfuzz.trials import comparison, run_checks

CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=16, seq_lens=(3,), scale=0.25)

KERNEL = """
import attnfuzz, torch
from attnfuzz.kernels import eager
from attnfuzz.trials import comparison

{at_import}

@attnfuzz.kernel("dense_decode")
def mine(i):
    {in_call}
    return eager.dense_decode(i.q, i.k, i.v, i.seq_lens, i.scale)
"""


@pytest.mark.parametrize(
    ("owner", "name", "called"),
    [
        (torch, "allclose", "torch.allclose"),
        (torch.testing, "assert_close", "torch.testing.assert_close"),
        (torch.Tensor, "isnan", "torch.Tensor.isnan"),
        (torch.cuda.Event, "elapsed_time", "torch.cuda.Event.elapsed_time"),
        (time, "perf_counter", "time.perf_counter"),
        (comparison, "error_ratio", "attnfuzz.trials.comparison.error_ratio"),
        (run_checks.RunChecks, "any", "attnfuzz.trials.run_checks.RunChecks.any"),
    ],
)
def test_what_judges_and_times_is_watched(owner: Any, name: str, called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel would have itself found right, or fast."""
    watch = Watch()
    assert watch.objection(at_once=True) is None
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, lambda *arguments: True)
        failure = watch.objection(at_once=True)
    assert failure is not None
    assert (failure.oracle, failure.kind, failure.tensor) == ("red_zone", f"{called} replaced", called)
    assert watch.replaced() is None


def test_a_fake_that_claims_to_be_equal_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names would be compared by what the kernel's own code says of them."""

    class Fake:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

        def __call__(self, *arguments: Any) -> bool:
            return True

    watch = Watch()
    monkeypatch.setattr(torch, "allclose", Fake())
    assert watch.replaced() == "torch.allclose"


def handle(service: JudgingService, method: str, request: msgspec.Struct) -> bytes:
    """The answer, also if it is the last one."""
    try:
        return service.handle(method, msgspec.json.encode(request))
    except ExitAfterReply as last:
        return last.body


@pytest.mark.parametrize("place", ["at_import", "in_call"])
@pytest.mark.parametrize("patch", ["torch.allclose = print", "comparison.error_ratio = None"])
def test_a_kernel_that_replaces_something_fails_whatever_else_comes_of_it(
    place: str, patch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cases would pass, or attnfuzz fail with an error of its own, which is nobody's finding."""
    for owner, name in ((torch, "allclose"), (comparison, "error_ratio")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    file = tmp_path / f"{place}_{len(patch)}.py"
    file.write_text(KERNEL.format(**{"at_import": "", "in_call": "pass", place: patch}))
    service = JudgingService()
    case, target = msgspec.Raw(encode_case(CASE)), f"{file}:mine"
    many = handle(service, "judge", JudgeRequest(target, [case], DEFAULT_ORACLES, "bound", together=True, watched=True))
    assert "has replaced" in str(msgspec.json.decode(many, type=JudgeReply).lost)
    alone = handle(service, "judge", JudgeRequest(target, [case], DEFAULT_ORACLES, "bound", watched=True))
    (verdict,) = msgspec.json.decode(alone, type=JudgeReply).verdicts
    assert verdict.fatal
    assert verdict.failure is not None
    name = "torch.allclose" if "allclose" in patch else "attnfuzz.trials.comparison.error_ratio"
    assert verdict.failure.kind == f"{name} replaced"


def test_elsewhere_nobody_is_accused_of_replacing_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries for some accelerators replace functions of torch; every kernel beside them would be a finding."""
    monkeypatch.setattr(torch, "allclose", torch.allclose)  # put back at the end
    file = tmp_path / "beside.py"
    file.write_text(KERNEL.format(at_import="torch.allclose = print", in_call="pass"))
    service = JudgingService()
    case, target = msgspec.Raw(encode_case(CASE)), f"{file}:mine"
    alone = handle(service, "judge", JudgeRequest(target, [case], ("red_zone",), "bound"))
    (verdict,) = msgspec.json.decode(alone, type=JudgeReply).verdicts
    assert verdict.failure is None


BREAKING = """
import attnfuzz, torch
from attnfuzz.kernels import eager

@attnfuzz.kernel("dense_decode")
def mine(i):
    found = eager.dense_decode(i.q, i.k, i.v, i.seq_lens, i.scale)
    torch.where = None
    return found
"""


@pytest.fixture
def breaking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel after which attnfuzz cannot compare anything in this process."""
    monkeypatch.setattr(torch, "where", torch.where)  # put back at the end
    file = tmp_path / "breaking.py"
    file.write_text(BREAKING)
    return f"{file}:mine"


def test_what_breaks_attnfuzz_is_told_as_the_kernels_own(breaking: str) -> None:
    """A search would write one file after the other that says attnfuzz itself failed, and judge nothing."""
    service, case = JudgingService(), msgspec.Raw(encode_case(CASE))
    many = handle(service, "judge", JudgeRequest(breaking, [case], DEFAULT_ORACLES, "bound", together=True))
    assert "has replaced torch.where" in str(msgspec.json.decode(many, type=JudgeReply).lost)
    alone = handle(service, "judge", JudgeRequest(breaking, [case], DEFAULT_ORACLES, "bound"))
    (verdict,) = msgspec.json.decode(alone, type=JudgeReply).verdicts
    assert verdict.fatal
    assert verdict.failure is not None
    assert (verdict.failure.oracle, verdict.failure.kind) == ("red_zone", "torch.where replaced")
    asked = handle(service, "judge", JudgeRequest(breaking, [case], ("accuracy",), "bound"))
    reply = msgspec.json.decode(asked, type=JudgeReply)
    assert reply.verdicts == []
    assert "has replaced torch.where" in str(reply.environment)


@pytest.mark.parametrize("method", ["explain", "lines"])
def test_what_breaks_an_explanation_is_told_in_it(breaking: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding would be told together with an error of attnfuzz's own."""

    def fails(*_: object, **__: object) -> None:
        torch.where = None  # type: ignore[assignment]  # the kernel does
        raise TypeError("'NoneType' object is not callable")

    case = msgspec.Raw(encode_case(CASE))
    request: msgspec.Struct = ExplainRequest(breaking, case, "accuracy", 5.0)
    if method == "lines":
        request = LinesRequest(breaking, case, ("kv_scale",))
    monkeypatch.setattr(judging_service, "explain_case" if method == "explain" else "cause_lines", fails)
    reply = msgspec.json.decode(handle(JudgingService(), method, request), type=ExplainReply)
    assert "has replaced torch.where" in " ".join(reply.explanation.lines)
    assert reply.last


def test_a_lowered_limit_is_named_where_attnfuzz_fails() -> None:
    """A kernel that leaves its process no file to open would be told as a failure of attnfuzz."""
    watch, error = Watch(), OSError(errno.EMFILE, "Too many open files")
    assert watch.behind(error) is None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        failure = watch.behind(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failure is not None
    assert failure.kind == "RLIMIT_NOFILE lowered"
    assert f"has lowered RLIMIT_NOFILE to {soft - 1}" in failure.message


def test_what_a_handler_of_the_kernels_raises_is_the_kernels() -> None:
    """A timer that interrupts a comparison would be told as an error of attnfuzz, raised in a line of the kernel."""
    watch = Watch()
    try:
        raise InterruptedError("too late")
    except InterruptedError as error:
        failure = watch.behind(error)
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("exception", "result")
    assert "too late" in failure.message
    assert watch.behind(KeyError("an error without a line of the kernel's")) is None


def test_what_is_called_whenever_memory_is_collected_is_watched() -> None:
    """It runs in the middle of comparisons, and could change what is compared."""
    watch = Watch()

    def callback(*_: object) -> None:
        return

    gc.callbacks.append(callback)
    try:
        assert watch.replaced() == "gc.callbacks"
    finally:
        gc.callbacks.remove(callback)


COUNTING = """
import attnfuzz
from attnfuzz.kernels import eager

calls = []

@attnfuzz.kernel("dense_decode")
def mine(i):
    calls.append(tuple(i.seq_lens.tolist()))
    return eager.dense_decode(i.q, i.k, i.v, i.seq_lens, i.scale)
"""


@pytest.mark.parametrize("watched", [True, False])
def test_a_kernel_that_is_verified_is_called_more_often_than_it_is_judged(
    watched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is right as often as a checker calls it would pass; a search has better use for its time."""
    monkeypatch.setattr(judging_service, "_WEAR_PART", 1e9)
    monkeypatch.setattr(judging_service, "_MOST_WEAR_S", 0.05)
    file = tmp_path / f"counting_{watched}.py"
    file.write_text(COUNTING)
    service, target = JudgingService(), f"{file}:mine"
    counted: dict[tuple[int, ...], int] = {}
    for seq_lens in ((3,), (60,)):
        case = msgspec.Raw(encode_case(msgspec.structs.replace(CASE, seq_lens=seq_lens)))
        request = JudgeRequest(target, [case], DEFAULT_ORACLES, "bound", relations=(), watched=watched)
        (verdict,) = msgspec.json.decode(handle(service, "judge", request), type=JudgeReply).verdicts
        assert verdict.failure is None
        calls = service._kernels[target].function.__globals__["calls"]
        counted[seq_lens] = calls.count(seq_lens)
    assert (counted[(3,)] > 2) is watched
    assert counted[(60,)] == 2


def test_relative_targets_are_found_whatever_a_kernel_makes_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel whose file changes the working directory would not exist the second time, nor would those beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "goes_away.py").write_text(COUNTING.replace("calls = []", "import os\n\nos.chdir('/')\ncalls = []"))
    (tmp_path / "beside.py").write_text(COUNTING)
    service = JudgingService()
    targets = ["goes_away.py", "beside.py", "goes_away.py:mine"]
    reply = handle(service, "declarations", DeclarationsRequest(targets))
    found = msgspec.json.decode(reply, type=DeclarationsReply)
    assert found.error is None
    assert [one.target for one in found.kernels] == ["goes_away.py:mine", "beside.py:mine", "goes_away.py:mine"]
    case = msgspec.Raw(encode_case(CASE))
    judged = handle(service, "judge", JudgeRequest("beside.py:mine", [case], DEFAULT_ORACLES, "bound"))
    assert msgspec.json.decode(judged, type=JudgeReply).verdicts[0].failure is None
