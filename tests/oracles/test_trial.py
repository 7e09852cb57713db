"""The runs of a case: when the second one is made in guarded memory, and what it counts for there."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from attnfuzz.isolation import memory_faults as fault_map
from attnfuzz.isolation.memory_faults import FaultMap, read_regions
from attnfuzz.judging import judge as judging
from attnfuzz.judging.batch import BatchLost
from attnfuzz.judging.judge import judge, judge_batch
from attnfuzz.problems.cases import Case
from attnfuzz.trials.trial import Trial
from attnfuzz.values import LogicalAttention
from attnfuzz.verdict import Verdict

Judged = Callable[[Any, Case], Verdict]


@pytest.fixture(autouse=True)
def guard_every_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the hash of the case."""
    monkeypatch.setattr(fault_map, "_installed", FaultMap(memoryview(bytearray(1 << 16))))
    monkeypatch.setattr(judging, "guard_of", lambda *_, **__: "end")


def alone(kernel: Any, case: Case) -> Verdict:
    return judge(kernel, case, device="cpu", relations=())


def in_a_batch(kernel: Any, case: Case) -> Verdict:
    verdicts = judge_batch(kernel, [case, case], device="cpu", relations=())
    assert verdicts[0].failure == verdicts[1].failure
    return verdicts[0]


def large_in_a_batch(kernel: Any, case: Case) -> Verdict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "_SMALL_BYTES", 0)
        return in_a_batch(kernel, case)


WAYS = pytest.mark.parametrize("judged", [alone, in_a_batch, large_in_a_batch])


def is_guarded() -> bool:
    """Whether this is within a run in guarded memory, of which the map of faults knows."""
    noted = fault_map.installed()
    assert noted is not None
    return bool(read_regions(bytes(noted._memory)))


@WAYS
def test_the_second_of_two_runs_is_guarded(judged: Judged, plant: Any, dense: Case) -> None:
    """Accesses outside would go unseen, or a passing case cost a run more."""
    runs: list[bool] = []
    verdict = judged(plant(before=lambda inputs: runs.append(is_guarded())), dense)
    assert verdict.failure is None
    assert 0 < verdict.error_ratio < 1
    cases = 1 if judged is alone else 2
    assert (runs.count(False), runs.count(True)) == (cases, cases)
    assert runs[0] is False


BUGS: dict[str, dict[str, Any]] = {
    "accuracy": {"kv_head": lambda head, group: 0},
    "dead_memory": {"length": lambda n: n + 1 if n else 0},
    "red_zone": {"before": lambda inputs: inputs.q.mul_(2)},
    "unwritten": {"store_empty": lambda out, lse: None},
}


@pytest.mark.by_day
@WAYS
@pytest.mark.parametrize("oracle", BUGS)
def test_symptoms_of_the_first_run_are_looked_into_in_ordinary_memory(
    oracle: str, judged: Judged, plant: Any, dense: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What shows by itself would be told as an access outside, or with other words than before."""
    runs: list[bool] = []
    bugs = BUGS[oracle]

    def before(inputs: Any) -> None:
        runs.append(is_guarded())
        bugs.get("before", lambda inputs: None)(inputs)

    kernel = plant(**bugs | {"before": before})
    failure = judged(kernel, dense).failure
    assert failure is not None
    assert failure.oracle == oracle
    assert True not in runs
    monkeypatch.setattr(judging, "guard_of", lambda *_, **__: None)
    assert failure == judged(kernel, dense).failure


@WAYS
def test_dead_memory_shows_in_the_guarded_run_too(judged: Judged, plant: Any, dense: Case) -> None:
    """A result that depends on a finite number beside a sequence would pass once its second run is guarded."""

    def add_what_is_dead(inputs: Any, out: Any, lse: Any) -> Any:
        return out + inputs.k[0, 5, 0, 0].nan_to_num(nan=0.0), lse

    failure = judged(plant(after=add_what_is_dead), dense).failure
    assert failure is not None
    assert failure.oracle == "dead_memory"


@WAYS
def test_bits_may_depend_on_how_memory_is_aligned(judged: Judged, plant: Any, dense: Case) -> None:
    """Operations of torch add in another order where a tensor is not aligned: that is not nondeterministic."""
    case = msgspec.structs.replace(dense, strides={"q": "padded_rows"})
    other_bits: list[bool] = []

    def add_in_another_order(inputs: Any, out: Any, lse: Any) -> Any:
        unaligned = inputs.q.data_ptr() % 64 != 0
        other_bits.append(unaligned)
        return out * (1 + 2.0**-22) if unaligned else out, lse

    assert judged(plant(after=add_in_another_order), case).failure is None
    assert True in other_bits


def test_what_differs_from_run_to_run_is_still_found(plant: Any, dense: Case) -> None:
    """A kernel that is not deterministic would pass because its second run was guarded."""
    numbers = itertools.count()
    failure = alone(plant(after=lambda inputs, out, lse: (out * (1 + next(numbers) * 2.0**-22), lse)), dense).failure
    assert failure is not None
    assert failure.oracle == "determinism"


@WAYS
def test_a_kernel_that_refuses_is_run_again_in_ordinary_memory(judged: Judged, plant: Any, dense: Case) -> None:
    """A kernel that wants aligned tensors would have one run, so that nothing is compared, or be accused."""
    runs: list[bool] = []

    def refuse(inputs: Any) -> None:
        runs.append(is_guarded())
        if is_guarded():
            raise ValueError("q must be aligned")

    assert judged(plant(before=refuse), dense).failure is None
    cases = 1 if judged is alone else 2
    assert (runs.count(False), runs.count(True)) == (2 * cases, cases)


def test_time_in_guarded_memory_counts(plant: Any, dense: Case) -> None:
    """Statistics would show half of what kernels take."""
    numbers = itertools.count(step=0.25)
    timing = judge(plant(), dense, device="cpu", relations=(), compile_clock=lambda: next(numbers)).timing
    assert timing.compile_s == 0.5
    (verdict,) = judge_batch(plant(), [dense], device="cpu", relations=(), compile_clock=lambda: next(numbers))
    assert verdict.timing.compile_s == 0.5


def test_without_a_guard_nothing_changes(plant: Any, dense: Case) -> None:
    """Reruns that relations and explanations make of a case would run in memory that may end the process."""
    runs: list[bool] = []
    trial = Trial(plant(before=lambda inputs: runs.append(is_guarded())), dense, device="cpu", tolerance="bound")
    assert not trial.checks.any()
    assert runs == [False, False]
    assert torch.equal(trial.runs[0].results["out"], trial.runs[1].results["out"])


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """What there is before a test is not found in it, nor spoiled for the tests after it."""
    gc.freeze()
    yield
    gc.unfreeze()


def float64_tensors() -> list[torch.Tensor]:
    """All that a look through the process finds."""
    return [one for one in gc.get_objects() if type(one) is torch.Tensor and one.dtype == torch.float64]


def values_of_cases() -> list[LogicalAttention]:
    return [one for one in gc.get_objects() if type(one) is LogicalAttention]


@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize("judged", [alone, in_a_batch, large_in_a_batch])
def test_expected_results_that_a_kernel_zeroes_are_told(plant: Any, dense: Case, judged: Judged) -> None:
    """Zeros would be right where the kernel makes zeros of what it is compared with."""

    def cheat(inputs: Any, out: torch.Tensor, lse: torch.Tensor) -> Any:
        for one in float64_tensors():
            one.zero_()
        return torch.zeros_like(out), torch.zeros_like(lse)

    kernel = plant(after=cheat)
    if judged is not alone:  # which judges each case of a lost batch
        with pytest.raises(BatchLost, match="has changed tensors that it was not given"):
            judged(kernel, dense)
        return
    verdict = judged(kernel, dense)
    assert verdict.fatal
    assert verdict.failure is not None
    assert "has changed tensors that it was not given" in verdict.failure.message


@pytest.mark.usefixtures("only_new_objects")
def test_numbers_that_a_kernel_zeroes_before_the_result_is_worked_out_are_told(plant: Any, dense: Case) -> None:
    """In a batch all runs are made before anything is expected of them."""

    def cheat(inputs: Any, out: torch.Tensor, lse: torch.Tensor) -> Any:
        for one in values_of_cases():
            one.v.zero_()
        return torch.zeros_like(out), lse

    kernel = plant(after=cheat)
    with pytest.raises(BatchLost, match="has changed tensors that it was not given"):
        judge_batch(kernel, [dense, dense], device="cpu", relations=())
    verdict = judge(kernel, dense, device="cpu", relations=())
    assert verdict.fatal
    assert verdict.failure is not None
    assert "has changed tensors that it was not given" in verdict.failure.message
