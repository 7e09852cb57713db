"""The judge on correct kernels, and which cause it names when there are several."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

import attnfuzz
from attnfuzz.judging.judge import judge, judge_batch
from attnfuzz.problems.cases import Case, PagedDecodeCase, SplitDecodeCase
from attnfuzz.problems.declared_numerics import FixedTolerance
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.problems.recipes import STRIDE_KINDS
from attnfuzz.verdict import Verdict

PROBLEMS = {"dense": "dense_decode", "paged": "paged_decode", "split": "split_decode", "states": "merge_states"}


@pytest.mark.by_day
@pytest.mark.parametrize("fixture", PROBLEMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_correct_kernel_passes(fixture: str, dtype: str, plant: Any, request: pytest.FixtureRequest) -> None:
    """A false alarm: the oracles would object to a correct kernel."""
    case: Case = msgspec.structs.replace(request.getfixturevalue(fixture), dtype=dtype)
    verdict = judge(plant(PROBLEMS[fixture]), case, device="cpu")
    assert verdict.failure is None
    assert 0 < verdict.error_ratio < 1


@pytest.mark.parametrize("strides", STRIDE_KINDS)
def test_correct_kernel_passes_with_strided_outputs(strides: Any, plant: Any, paged: PagedDecodeCase) -> None:
    """Writing into an offered output with gaps would be taken for a stray write."""

    def fill_given(inputs: Any, out: Any, lse: Any) -> None:
        inputs.out.copy_(out)
        inputs.lse.copy_(lse)

    case = msgspec.structs.replace(paged, strides=dict.fromkeys(("q", "k_cache", "out", "lse"), strides))
    assert judge(plant("paged_decode", after=fill_given), case, device="cpu").failure is None


def test_base_2_lse_is_converted(plant: Any, dense: Case) -> None:
    """A kernel that declares and returns base 2 would be reported wrong."""
    kernel = plant(supports=attnfuzz.Supports(lse="base2"), lse=lambda s: s.logsumexp(0) / torch.tensor(2.0).log())
    assert judge(kernel, dense, device="cpu").failure is None


def test_kernel_without_lse_is_judged_by_out_alone(plant: Any, dense: Case) -> None:
    """A kernel that declares no LSE would be blamed for not writing it."""
    kernel = plant(supports=attnfuzz.Supports(lse="none"), after=lambda inputs, out, lse: out)
    verdict = judge(kernel, dense, device="cpu")
    assert verdict.failure is None
    assert verdict.error_ratio > 0


def test_passing_case_runs_twice(plant: Any, dense: Case) -> None:
    """A passing case would cost more kernel runs than the two that it needs."""
    runs: list[int] = []
    kernel = plant(before=lambda inputs: runs.append(1))
    assert judge(kernel, dense, device="cpu", relations=()).failure is None
    assert len(runs) == 2


def test_first_run_can_be_believed(plant: Any, dense: Case, failure_of: Any) -> None:
    """Without `run_twice` a passing case would not be cheaper, or a failing one less well explained."""
    runs: list[int] = []
    judge(plant(before=lambda inputs: runs.append(1)), dense, device="cpu", run_twice=False, relations=())
    assert len(runs) == 1
    verdict = judge(plant(length=lambda n: n + 1 if n else 0), dense, device="cpu", run_twice=False)
    assert verdict.failure == failure_of(plant(length=lambda n: n + 1 if n else 0), dense)


def test_timing_covers_the_parts(plant: Any, dense: Case) -> None:
    """Statistics would show no time for a part that took some."""
    timing = judge(plant(), dense, device="cpu").timing
    parts = (timing.build_s, timing.kernel_s, timing.reference_s)
    assert min(parts) > 0
    assert sum(parts) <= timing.total_s


def in_a_batch(kernel: Any, case: Case, **how: Any) -> Verdict:
    (verdict,) = judge_batch(kernel, [case], **how)
    return verdict


@pytest.mark.parametrize("judge", [judge, in_a_batch])
def test_only_oracles_asked_for_are_applied(judge: Any, plant: Any, dense: Case) -> None:
    """A user who asks for one oracle would be shown the findings of another."""
    kernel = plant(length=lambda n: n + 1 if n else 0)
    assert judge(kernel, dense, device="cpu", oracles=("red_zone", "determinism")).failure is None
    failure = judge(kernel, dense, device="cpu", oracles=("accuracy",), inquire=False).failure
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("accuracy", "out:nan")


@pytest.mark.parametrize("judge", [judge, in_a_batch])
def test_fixed_tolerance_replaces_the_bound(judge: Any, plant: Any, dense: Case) -> None:
    """A user's own tolerance would not be used, or would be stricter than it says."""
    kernel = plant(average=lambda weights, v: weights @ v + 0.01)
    passes = judge(kernel, dense, device="cpu", tolerance=FixedTolerance(atol=0.1, rtol=0.0), relations=())
    assert passes.failure is None
    assert passes.error_ratio == pytest.approx(0.1, rel=0.01)
    strict = FixedTolerance(atol=1e-3, rtol=0.0)
    assert judge(kernel, dense, device="cpu", tolerance=strict, inquire=False).failure is not None


def test_too_large_a_case_is_refused_before_it_runs(plant: Any, split: SplitDecodeCase) -> None:
    """A case could take more memory than allowed."""
    runs: list[int] = []
    with pytest.raises(CaseTooLarge, match="limit is 1e\\+03 B"):
        judge(plant("split_decode", before=lambda inputs: runs.append(1)), split, device="cpu", size_limit=1000)
    assert not runs


def test_first_run_comes_first(plant: Any, dense: Case) -> None:
    """Without NaN in dead memory first, what a crash or hang is attributed to would be another run's doing."""
    held: list[bool] = []
    kernel = plant(before=lambda inputs: held.append(bool(inputs.k[0, 5].isnan().any())))
    judge(kernel, dense, device="cpu", relations=())
    assert held == [True, False]
