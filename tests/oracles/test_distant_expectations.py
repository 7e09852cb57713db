"""Expectations worked out elsewhere are those worked out here."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import pytest
import torch

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.registry import problem_of
from attnfuzz.memory.image import Fetch
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.supports import Supports
from attnfuzz.trials import expectations as distant_expectations
from attnfuzz.trials.expectations import DistantExpectations, expectations
from attnfuzz.values.tokens import all_on_device

ELSEWHERE = "cuda" if torch.cuda.is_available() else "cpu:0"  # not the string for "stay here"


@pytest.mark.by_day
@pytest.mark.parametrize("work", [0, 300, 1 << 30])
@pytest.mark.parametrize("fixture", ["dense", "paged", "split", "states"])
def test_same_numbers_as_here(
    fixture: str, work: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case would be compared with another one's expectation, or with half of its own."""
    monkeypatch.setattr(distant_expectations, "_HOST_WORK", work)
    case = request.getfixturevalue(fixture)
    cases = [msgspec.structs.replace(case, dtype=dtype) for dtype in ("float16", "float32", "bfloat16")]
    cases.append(msgspec.structs.replace(case, num_q_heads=2 * case.num_q_heads))
    declaration = Declaration(name="any", problem=case.problem)
    contents = problem_of(case).contents(cases, "cpu", Supports())
    requests: Any = [(declaration, one, of_one.values) for one, of_one in zip(cases, contents, strict=True)]
    found = DistantExpectations(requests, ELSEWHERE, "bound", False, Fetch())
    if ELSEWHERE == "cuda":
        torch.cuda.synchronize()
    expected = expectations(requests, tolerance="bound", one_copy=False)
    for one, other in zip(found.at_home(), expected, strict=True):
        torch.testing.assert_close(one.expected.out, other.expected.out)
        torch.testing.assert_close(one.expected.lse, other.expected.lse)
        torch.testing.assert_close(one.bound.out, other.bound.out)
        torch.testing.assert_close(one.bound.lse, other.bound.lse)


def test_caches_of_8_bits_and_others_in_one_batch(paged: PagedDecodeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales would stay behind on the host, or those that a case does not have be looked for."""
    sent_to = "meta"  # no numbers can be worked out there, and none be taken for those on the host
    quantised = msgspec.structs.replace(paged, kv=QuantisedKv(dtype="float8_e4m3fn"))
    cases = [paged, quantised, paged, quantised]
    contents = problem_of(paged).contents(cases, "cpu", Supports())
    declaration = Declaration(name="any", problem=paged.problem)
    seen: list[Any] = []
    monkeypatch.setattr(distant_expectations, "_HOST_WORK", 0)
    monkeypatch.setattr(distant_expectations, "all_on_device", lambda hosts, to: [host.to(to) for host in hosts])

    def expect(requests: Any, **_: Any) -> list[Any]:
        seen.extend(requests)
        return []

    monkeypatch.setattr(distant_expectations, "expectations", expect)
    requests: Any = [(declaration, case, of_one.values) for case, of_one in zip(cases, contents, strict=True)]
    DistantExpectations(requests, sent_to, "bound", False, Fetch())
    assert [values.kv_scales is not None for *_, values in seen] == [False, True, False, True]
    for *_, values in seen:
        parts = [getattr(values, field.name) for field in fields(values)]
        assert {part.device.type for part in parts if isinstance(part, torch.Tensor)} == {sent_to}


def test_tensors_of_several_dtypes_arrive_in_their_order() -> None:
    """One case would be given another's numbers."""
    tensors = [
        torch.arange(4.0).view(2, 2),
        torch.arange(3),
        torch.ones(1, 5),
        torch.empty(0, 2),
        torch.arange(6).view(2, 3).T,
    ]
    for one, other in zip(all_on_device(tensors, ELSEWHERE), tensors, strict=True):
        assert torch.equal(one.cpu(), other)
    assert all_on_device([], ELSEWHERE) == []
