"""Many cases at once: the verdicts that each would get alone, from as many kernel runs."""

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
from attnfuzz.judging import judge as judging
from attnfuzz.judging.batch import Batch, BatchLost
from attnfuzz.judging.judge import judge, judge_batch
from attnfuzz.memory.image import plan_of
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.problems.limits import CaseTooLarge, case_nbytes
from attnfuzz.verdict import Verdict

PROBLEMS = {
    "dense": "dense_decode",
    "paged": "paged_decode",
    "split": "split_decode",
    "queries": "paged_attention",
    "states": "merge_states",
}


def without_timing(verdicts: list[Verdict]) -> list[Verdict]:
    """Also without the last places of ratios: float64 sums of a batch may be taken in another order."""
    return [
        msgspec.structs.replace(verdict, timing=Verdict().timing, error_ratio=float(f"{verdict.error_ratio:.12g}"))
        for verdict in verdicts
    ]


def of_several_dtypes(case: Case) -> list[Case]:
    return [msgspec.structs.replace(case, dtype=dtype) for dtype in ("float16", "float32", "bfloat16", "float16")]


def raise_for_long_ones(inputs: Any) -> None:
    if int(inputs.seq_lens.max()) > 10:
        raise IndexError("too long")


def write_past_out(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1)
    return out, lse


def leave_one(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    inputs.out.copy_(out)
    inputs.out[0, 0, 0] = torch.nan
    inputs.lse[1:].copy_(lse[1:])


BUGS: dict[str, dict[str, Callable[..., Any]]] = {
    "none": {},
    "dead memory": {"length": lambda n: n + 1 if n else 0},
    "accuracy": {"kv_head": lambda head, group: 0},
    "exception": {"before": raise_for_long_ones},
    "red zone": {"after": write_past_out},
    "modified input": {"before": lambda inputs: inputs.q.mul_(2)},
    "unwritten": {"after": leave_one},
    "no lse": {"after": lambda inputs, out, lse: out},
    "no lse, and wrong": {"after": lambda inputs, out, lse: out, "kv_head": lambda head, group: 0},
    "no lse, and dead memory": {"after": lambda inputs, out, lse: out, "length": lambda n: n + 1 if n else 0},
    "no result": {"after": lambda inputs, out, lse: 7},
}


def spoil(value: float) -> Callable[..., Any]:
    """Replace one element of out."""

    def after(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        out.view(-1)[out.numel() // 2] = value
        return out, lse

    return after


def spoil_lse(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    lse.view(-1)[lse.numel() // 2] += 0.5
    return out, lse


def store_in_empty(out_value: float, lse_value: float) -> Callable[[Tensor, Tensor], None]:
    def store(out: Tensor, lse: Tensor) -> None:
        out.fill_(out_value)
        lse.fill_(lse_value)

    return store


BUGS_OF_ALL: dict[str, dict[str, Callable[..., Any]]] = {
    "wrong": {"after": spoil(7.0)},
    "nan": {"after": spoil(math.nan)},
    "lse": {"after": spoil_lse},
    "empty is not 0": {"store_empty": store_in_empty(1.0, -math.inf)},
    "empty is nan": {"store_empty": store_in_empty(math.nan, -math.inf)},
    "empty has weight": {"store_empty": store_in_empty(0.0, 0.0)},
}


@pytest.mark.parametrize("bug", BUGS_OF_ALL)
@pytest.mark.parametrize("fixture", PROBLEMS)
@pytest.mark.by_day
def test_a_bug_of_any_problem_is_seen_as_in_single_cases(
    fixture: str, bug: str, plant: Any, request: pytest.FixtureRequest
) -> None:
    """In a batch a symptom would be missed, made up, or found on another case."""
    kernel, cases = plant(PROBLEMS[fixture], **BUGS_OF_ALL[bug]), of_several_dtypes(request.getfixturevalue(fixture))
    alone = [judge(kernel, case, device="cpu", inquire=False, relations=()) for case in cases]
    for one, many in zip(alone, judge_batch(kernel, cases, device="cpu", relations=()), strict=True):
        assert many.failure == one.failure
        assert many.error_ratio == pytest.approx(one.error_ratio, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("bug", ["none", "empty is nan", "empty has weight"])
def test_splits_of_several_shapes(bug: str, plant: Any, split: Any) -> None:
    """Partial states of different shapes or lengths would be merged with each other's."""
    kernel = plant("split_decode", **BUGS_OF_ALL.get(bug, {}))
    cases = [
        msgspec.structs.replace(split, num_splits=splits, head_size=head_size, seq_lens=seq_lens)
        for splits, head_size, seq_lens in itertools.product((1, 4), (8, 16), ((21,), (3, 0, 9)))
    ]
    alone = [judge(kernel, case, device="cpu", inquire=False, relations=()) for case in cases]
    together = judge_batch(kernel, cases, device="cpu", relations=())
    assert [one.failure for one in together] == [one.failure for one in alone]


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_differs_is_told_of_its_case_unless_nothing_is_promised(
    deterministic: bool, plant: Any, dense: Case
) -> None:
    """Nondeterminism would be found on another case, on all of the batch, or on a kernel that says that it is so."""
    calls = itertools.count()

    def once(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        out[0, 0, 0] += 2.0**-20 if next(calls) == 3 else 0.0
        return out, lse

    kernel = plant(after=once, supports=attnfuzz.Supports(deterministic=deterministic))
    verdicts = judge_batch(kernel, [dense] * 3, device="cpu", relations=())
    assert [verdict.failure is not None for verdict in verdicts] == [False, deterministic, False]


@pytest.mark.parametrize("bug", BUGS)
def test_verdicts_are_those_of_single_cases(bug: str, plant: Any, dense: DenseDecodeCase) -> None:
    """In a batch a failure would be missed, blamed on another case, or told with other words."""
    kernel = plant(**BUGS[bug])
    cases = [dense, msgspec.structs.replace(dense, seq_lens=(0, 3)), msgspec.structs.replace(dense, seq_lens=(9,))]
    alone = [judge(kernel, case, device="cpu", inquire=False) for case in cases]
    together = judge_batch(kernel, cases, device="cpu")
    assert without_timing(together) == without_timing(alone)
    assert any(verdict.failure for verdict in together) == (bug != "none")


@pytest.mark.parametrize("fixture", PROBLEMS)
@pytest.mark.by_day("queries")
def test_every_problem_in_mixed_dtypes(fixture: str, plant: Any, request: pytest.FixtureRequest) -> None:
    """Cases of one problem would spoil each other where their dtypes differ."""
    cases = of_several_dtypes(request.getfixturevalue(fixture))
    kernel = plant(PROBLEMS[fixture])
    alone = [judge(kernel, case, device="cpu", inquire=False) for case in cases]
    assert all(verdict.failure is None for verdict in alone)
    for one, many in zip(alone, judge_batch(kernel, cases, device="cpu"), strict=True):
        assert many.failure is None
        # A processor sums matrices of another shape in another order: one unit in the last place of float64 is some
        # 1e-9 of a bound of float32.
        assert many.error_ratio == pytest.approx(one.error_ratio, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("run_twice", [True, False])
def test_passing_cases_run_no_more_often_than_alone(plant: Any, dense: Case, run_twice: bool) -> None:
    """Judging in batches would cost more kernel runs than it saves."""
    runs: list[int] = []
    kernel = plant(before=lambda inputs: runs.append(1))
    judge_batch(kernel, [dense] * 3, device="cpu", run_twice=run_twice, relations=())
    assert len(runs) == (6 if run_twice else 3)


def test_what_a_batch_has_seen_counts(plant: Any, dense: Case) -> None:
    """A kernel that fails now and then would have to fail twice to be reported."""
    calls = itertools.count()

    def fail_once(inputs: Any) -> None:
        if next(calls) == 2:
            raise IndexError

    verdicts = judge_batch(plant(before=fail_once), [dense] * 3, device="cpu")
    assert [verdict.failure is None for verdict in verdicts] == [True, False, True]


def test_first_run_can_be_believed(plant: Any, dense: Case) -> None:
    """Without `run_twice` a failing case of a batch would be less well explained."""
    kernel = plant(length=lambda n: n + 1 if n else 0)
    alone = judge(kernel, dense, device="cpu", inquire=False)
    assert without_timing(judge_batch(kernel, [dense], device="cpu", run_twice=False)) == without_timing([alone])


@pytest.mark.parametrize("small", [True, False])
def test_what_does_not_fit_goes_into_another_batch(
    small: bool, plant: Any, dense: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of many or large cases would not fit into memory."""
    if not small:
        monkeypatch.setattr(judging, "_SMALL_BYTES", 0)
    monkeypatch.setattr(judging, "_IMAGE_BYTES", 2 * plan_of(dense).nbytes)
    monkeypatch.setattr(judging, "_BATCH_BYTES", 2 * case_nbytes(dense))
    sizes: list[int] = []
    judge_together = judging._Judge._at_home

    def judge_and_note(self: Any, cases: list[Any], *rest: Any) -> list[Verdict]:
        sizes.append(len(cases))
        return judge_together(self, cases, *rest)

    monkeypatch.setattr(judging._Judge, "_at_home", judge_and_note)
    assert len(judge_batch(plant(), [dense] * 5, device="cpu")) == 5
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.by_day("none", "exception", "no lse, and dead memory")
def test_small_and_large_cases_in_turn(
    bug: str, plant: Any, dense: DenseDecodeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts would change places, or large cases be judged by other rules than small ones."""
    small, smaller = (msgspec.structs.replace(dense, seq_lens=lengths) for lengths in ((9,), (4,)))
    assert plan_of(smaller).nbytes <= plan_of(small).nbytes < plan_of(dense).nbytes
    monkeypatch.setattr(judging, "_SMALL_BYTES", plan_of(small).nbytes)
    kernel = plant(**BUGS[bug])
    cases = [dense, small, dense, smaller]
    alone = [judge(kernel, case, device="cpu", inquire=False) for case in cases]
    assert without_timing(judge_batch(kernel, cases, device="cpu")) == without_timing(alone)


def test_damage_by_another_case_is_not_blamed_on_its_neighbour(plant: Any, dense: DenseDecodeCase) -> None:
    """A case would be reported for what the one before it in memory wrote."""
    writer = msgspec.structs.replace(dense, seq_lens=(1,))

    def write_far(inputs: Any) -> None:
        if inputs.seq_lens.shape == (1,):
            end = inputs.lse.untyped_storage().nbytes() // 4
            inputs.lse.as_strided((1,), (1,), end - (1 << 13)).fill_(7.0)

    verdicts = judge_batch(plant(before=write_far), [writer, dense], device="cpu")
    assert verdicts[1].failure is None


def test_too_large_a_case_is_refused(plant: Any, dense: Case) -> None:
    """A case that does not fit would be tried after all."""
    with pytest.raises(CaseTooLarge):
        judge_batch(plant(), [dense, dense], device="cpu", size_limit=1)


def test_no_case_no_verdict(plant: Any) -> None:
    """An empty batch would fail."""
    assert judge_batch(plant(), [], device="cpu") == []


def test_interrupt_is_passed_on(plant: Any, dense: Case) -> None:
    """Ctrl-C during a batch would be taken for the kernel's."""

    def interrupt(inputs: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge_batch(plant(before=interrupt), [dense], device="cpu")
    (verdict,) = judge_batch(plant(before=interrupt), [dense], device="cpu", catch_interrupt=True)
    assert verdict.failure is not None


@pytest.mark.parametrize(("relations", "runs"), [((), 2), (("value_affinity",), 3)])
def test_timing_covers_the_parts(plant: Any, dense: Case, relations: Any, runs: int) -> None:
    """Statistics would show no time for a part that took some, or compilation twice."""
    seconds = itertools.count(step=0.25)
    kernel = plant(before=lambda inputs: None)
    verdicts = judge_batch(kernel, [dense] * 3, device="cpu", compile_clock=lambda: next(seconds), relations=relations)
    for verdict in verdicts:
        timing = verdict.timing
        assert min(timing.build_s, timing.reference_s) > 0
        assert timing.compile_s == 0.25 * runs
        assert timing.build_s + timing.reference_s + timing.kernel_s + timing.compile_s <= timing.total_s


class TestLostGpu:
    """CUDA errors that outlive the launch."""

    @staticmethod
    def lose_context(monkeypatch: pytest.MonkeyPatch) -> None:
        def synchronize() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    def test_in_a_kernel(self, plant: Any, dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        """The case at which CUDA complains would be blamed for what an earlier one did."""

        def fail(inputs: Any) -> None:
            self.lose_context(monkeypatch)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        with pytest.raises(BatchLost, match="illegal memory access"):
            judge_batch(plant(before=fail), [dense, dense], device="cpu")

    def test_between_kernels(self, plant: Any, dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        """An error that shows while the framework works would count as the framework's."""

        def expect(batch: Any) -> None:
            self.lose_context(monkeypatch)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(Batch, "expect", expect)
        with pytest.raises(BatchLost, match="illegal memory access"):
            judge_batch(plant(), [dense, dense], device="cpu")

    def test_error_of_the_framework_is_none(self, plant: Any, dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        """A mistake in here would look like a lost GPU."""

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("a mistake")

        monkeypatch.setattr(judging._Judge, "_of_trial", fail)
        with pytest.raises(RuntimeError, match="a mistake"):
            judge_batch(plant(kv_head=lambda head, group: 0), [dense], device="cpu")

    def test_memory(self, plant: Any, dense: Case) -> None:
        """A kernel would be blamed for memory that other cases of its batch hold."""

        def fail(inputs: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.\nGPU 0 has a total capacity of 8 GiB")

        with pytest.raises(BatchLost, match=r"CUDA out of memory\."):
            judge_batch(plant(before=fail), [dense, dense], device="cpu")
