"""What is found on many cases at once is what a trial finds on each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.judging.batch import Batch, Candidate
from attnfuzz.memory.image import plan_of
from attnfuzz.problems.cases import Case
from attnfuzz.trials.symptoms import Symptoms
from attnfuzz.trials.trial import Trial

PROBLEMS = {"dense": "dense_decode", "paged": "paged_decode", "split": "split_decode", "states": "merge_states"}


def spoil(value: float) -> Callable[..., Any]:
    """Replace one element of out."""

    def after(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        out.view(-1)[out.numel() // 2] = value
        return out, lse

    return after


def spoil_lse(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    lse.view(-1)[lse.numel() // 2] += 0.5
    return out, lse


def leave_unwritten(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    fresh = torch.empty_like(out)
    fresh[1:] = out[1:]
    return fresh, lse


def store_in_empty(out_value: float, lse_value: float) -> Callable[[Tensor, Tensor], None]:
    def store(out: Tensor, lse: Tensor) -> None:
        out.fill_(out_value)
        lse.fill_(lse_value)

    return store


def overrun(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    buffer = torch.empty(5)
    buffer.as_strided((1,), (1,), buffer.storage_offset() + 6).fill_(1.0)
    return out, lse


BUGS: dict[str, dict[str, Any]] = {
    "none": {},
    "wrong": {"after": spoil(7.0)},
    "nan": {"after": spoil(math.nan)},
    "lse": {"after": spoil_lse},
    "unwritten": {"after": leave_unwritten},
    "overrun": {"after": overrun},
    "modified": {"before": lambda inputs: next(iter(vars_of(inputs))).mul_(2)},
    "empty is not 0": {"store_empty": store_in_empty(1.0, -math.inf)},
    "empty is nan": {"store_empty": store_in_empty(math.nan, -math.inf)},
    "empty has weight": {"store_empty": store_in_empty(0.0, 0.0)},
}


def vars_of(inputs: Any) -> Any:
    names = ("q", "prefix_output")
    return (getattr(inputs, name) for name in names if hasattr(inputs, name))


def symptoms_together(kernel: Any, cases: list[Case], *, twice: bool = True) -> list[Any]:
    batch = Batch(
        kernel,
        [Candidate(case, plan_of(case)) for case in cases],
        device="cpu",
        home="cpu",
        tolerance="bound",
        twice=twice,
        compile_clock=lambda: 0.0,
    )
    batch.launch()
    batch.expect()
    return batch.symptoms()


def assert_same(found: Symptoms, expected: Symptoms) -> None:
    flags = [(one.damaged, one.unwritten, one.differs) for one in (found, expected)]
    assert flags[0] == flags[1]
    # A processor sums matrices of another shape in another order: one unit in the last place of float64 is some 1e-9
    # of a bound of float32.
    assert found.error_ratio == pytest.approx(expected.error_ratio, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("fixture", PROBLEMS)
@pytest.mark.by_day("paged-none", "paged-wrong", "paged-unwritten", "paged-overrun", "paged-modified")
def test_symptoms_are_those_of_a_trial(fixture: str, bug: str, plant: Any, request: pytest.FixtureRequest) -> None:
    """In a batch a symptom would be missed, made up, or found on another case."""
    case = request.getfixturevalue(fixture)
    kernel = plant(PROBLEMS[fixture], **BUGS[bug])
    cases = [msgspec.structs.replace(case, dtype=dtype) for dtype in ("float16", "float32", "bfloat16", "float32")]
    for found, one in zip(symptoms_together(kernel, cases), cases, strict=True):
        assert_same(found, Trial(kernel, one, device="cpu", tolerance="bound").symptoms)


@pytest.mark.parametrize("bug", ["none", "empty is nan", "empty has weight"])
def test_splits_of_several_shapes(bug: str, plant: Any, split: Any) -> None:
    """Partial states of different shapes or lengths would be merged with each other's."""
    kernel = plant("split_decode", **BUGS[bug])
    cases = [
        msgspec.structs.replace(split, num_splits=splits, head_size=head_size, seq_lens=seq_lens)
        for splits, head_size, seq_lens in itertools.product((1, 4), (8, 16), ((21,), (3, 0, 9)))
    ]
    for found, one in zip(symptoms_together(kernel, cases), cases, strict=True):
        assert_same(found, Trial(kernel, one, device="cpu", tolerance="bound").symptoms)


@pytest.mark.parametrize("fixture", ["dense", "states"])
@pytest.mark.parametrize("lse", ["base2", "none"])
def test_lse_is_read_as_declared(fixture: str, lse: Any, plant: Any, request: pytest.FixtureRequest) -> None:
    """A kernel that returns another base, or no LSE, would be judged by other numbers in a batch."""
    case = request.getfixturevalue(fixture)
    kernel = plant(PROBLEMS[fixture], supports=attnfuzz.Supports(lse=lse))
    (found, _) = symptoms_together(kernel, [case, case])
    assert_same(found, Trial(kernel, case, device="cpu", tolerance="bound").symptoms)


def test_difference_is_seen_on_its_case(plant: Any, dense: Case) -> None:
    """Nondeterminism would be found on another case, or on all of the batch."""
    calls = itertools.count()

    def once(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        out[0, 0, 0] += 2.0**-20 if next(calls) == 3 else 0.0
        return out, lse

    found = symptoms_together(plant(after=once), [dense] * 3)
    assert [symptoms.differs for symptoms in found] == [False, True, False]


def test_kernel_that_makes_no_promise_may_differ(plant: Any, dense: Case) -> None:
    """A kernel that declares itself nondeterministic would be accused of it in a batch."""
    calls = itertools.count()

    def differ(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        out[0, 0, 0] += next(calls) * 2.0**-24
        return out, lse

    kernel = plant(after=differ, supports=attnfuzz.Supports(deterministic=False))
    assert not any(symptoms.any() for symptoms in symptoms_together(kernel, [dense] * 2))


def test_one_run_is_enough_to_look_at(plant: Any, dense: Case) -> None:
    """Without a second run there would be nothing to see."""
    (good,) = symptoms_together(plant(), [dense], twice=False)
    (bad,) = symptoms_together(plant(after=spoil(7.0)), [dense], twice=False)
    assert not good.any()
    assert bad.error_ratio > 1
    assert len(good.damaged) == 1
