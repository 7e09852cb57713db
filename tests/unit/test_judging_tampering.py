"""What kernels replace in the process that judges them is seen; what changes by itself is not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from attnfuzz.isolation.serve import ExitAfterReply
from attnfuzz.judging.messages import JudgeReply, JudgeRequest
from attnfuzz.judging.service import JudgingService
from attnfuzz.judging.tampering import Watch
from attnfuzz.problems.cases import DenseDecodeCase, encode_case
from attnfuzz.trials import comparison, symptoms
from attnfuzz.verdict import DEFAULT_ORACLES

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
        (symptoms.Symptoms, "any", "attnfuzz.trials.symptoms.Symptoms.any"),
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
    monkeypatch.setenv("ATTNFUZZ_WATCH", "1")
    service = JudgingService()
    case, target = msgspec.Raw(encode_case(CASE)), f"{file}:mine"
    many = handle(service, "judge", JudgeRequest(target, [case], DEFAULT_ORACLES, "bound", together=True))
    assert "has replaced" in str(msgspec.json.decode(many, type=JudgeReply).lost)
    alone = handle(service, "judge", JudgeRequest(target, [case], DEFAULT_ORACLES, "bound"))
    (verdict,) = msgspec.json.decode(alone, type=JudgeReply).verdicts
    assert verdict.fatal
    assert verdict.failure is not None
    name = "torch.allclose" if "allclose" in patch else "attnfuzz.trials.comparison.error_ratio"
    assert verdict.failure.kind == f"{name} replaced"


def test_elsewhere_nobody_is_accused_of_replacing_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries for some accelerators replace functions of torch; every kernel beside them would be a finding."""
    monkeypatch.setattr(torch, "allclose", torch.allclose)  # put back at the end
    monkeypatch.delenv("ATTNFUZZ_WATCH", raising=False)
    file = tmp_path / "beside.py"
    file.write_text(KERNEL.format(at_import="torch.allclose = print", in_call="pass"))
    service = JudgingService()
    case, target = msgspec.Raw(encode_case(CASE)), f"{file}:mine"
    alone = handle(service, "judge", JudgeRequest(target, [case], ("red_zone",), "bound"))
    (verdict,) = msgspec.json.decode(alone, type=JudgeReply).verdicts
    assert verdict.failure is None
