"""Results never written, and results made of memory nobody wrote."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from attnfuzz.judging.judge import judge, judge_batch
from attnfuzz.problems.cases import Case, MergeStatesCase, SplitDecodeCase
from attnfuzz.problems.supports import Supports


def nothing(out: Tensor, lse: Tensor) -> None:
    """Store nothing."""


def test_empty_sequence_left_unwritten(plant: Any, dense: Case, failure_of: Any) -> None:
    """A kernel that skips empty sequences would pass, and stale memory would reach the model."""
    failure = failure_of(plant(store_empty=nothing), dense)
    assert (failure.oracle, failure.kind) == ("unwritten", "out")
    assert failure.message == "out[seq 1, head 0, dim 0] was never written"
    assert "sequence 1 has length 0" in failure.details


@pytest.mark.parametrize("offered", [True, False])
def test_rows_left_unwritten(offered: bool, plant: Any, dense: Case, failure_of: Any) -> None:
    """A missing row would be seen only in outputs that the kernel allocates, or only in those it is given."""

    def skip_last_head(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        target = inputs.out if offered else torch.empty_like(out)
        target[:, :-1] = out[:, :-1]
        return target, lse

    failure = failure_of(plant(after=skip_last_head), dense)
    assert (failure.oracle, failure.kind) == ("unwritten", "out")
    assert "24 of 96 elements of out (seq 0-2, head 3, dim 0-7)" in failure.details[0]


def test_lse_left_unwritten(plant: Any, dense: Case, failure_of: Any) -> None:
    """A kernel that returns no LSE but does not say so would be reported without the remedy."""
    failure = failure_of(plant(after=lambda inputs, out, lse: out), dense)
    assert (failure.oracle, failure.kind) == ("unwritten", "lse")
    assert failure.remedy == {"lse": "none"}


@pytest.mark.parametrize(
    ("bug", "oracle"),
    [
        ({"kv_head": lambda head, group: 0}, "accuracy"),
        ({"length": lambda n: n + 1 if n else 0}, "dead_memory"),
        ({"before": lambda inputs: inputs.q.mul_(2)}, "red_zone"),
        ({"store_empty": lambda out, lse: out.fill_(1)}, "accuracy"),
    ],
)
def test_a_missing_lse_hides_nothing(
    bug: dict[str, Any], oracle: str, plant: Any, dense: Case, failure_of: Any
) -> None:
    """It is missing in every case, so no campaign would see more of a kernel that does not declare it."""
    bare = plant(after=lambda inputs, out, lse: out, **bug)
    declared = plant(supports=Supports(lse="none"), after=lambda inputs, out, lse: out, **bug)
    failure = failure_of(bare, dense)
    assert failure.oracle == oracle
    assert failure == failure_of(declared, dense)


@pytest.mark.parametrize("problem", ["dense", "states"])
@pytest.mark.parametrize("together", [False, True])
def test_a_missing_lse_hides_nothing_from_relations(
    problem: str, together: bool, plant: Any, request: pytest.FixtureRequest
) -> None:
    """What a kernel remembers of other calls, or where it looks for far pages, would be asked of no such kernel."""
    calls: list[int] = []

    def remember(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        del inputs, lse
        calls.append(1)
        return out if len(calls) < 3 else out * 2

    case = request.getfixturevalue(problem)
    name = case.problem
    bare = plant(name, after=remember)
    relations: Any = ("value_affinity",)
    if together:
        (verdict,) = judge_batch(bare, [case], device="cpu", relations=relations)
    else:
        verdict = judge(bare, case, device="cpu", relations=relations)
    assert verdict.failure is not None
    assert verdict.failure.oracle == "value_affinity"
    right = plant(name, after=lambda inputs, out, lse: out)
    for found in (judge(right, case, device="cpu"), *judge_batch(right, [case], device="cpu")):
        assert found.failure is not None
        assert found.failure.oracle == "unwritten"


def test_an_lse_that_is_missing_in_part_comes_first(plant: Any, dense: Case, failure_of: Any) -> None:
    """The row that a kernel leaves out would be taken for wrong numbers in another."""

    def skip_last(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        inputs.lse[:-1] = lse[:-1]
        return out

    failure = failure_of(plant(after=skip_last, kv_head=lambda head, group: 0), dense)
    assert (failure.oracle, failure.kind) == ("unwritten", "lse")


def test_unwritten_partial_of_an_empty_split(plant: Any, split: SplitDecodeCase, failure_of: Any) -> None:
    """The output beside an LSE of -inf could stay unwritten: NaN times a weight of 0 is NaN in the reduction."""
    failure = failure_of(plant("split_decode", store_empty=lambda out, lse: lse.fill_(-torch.inf)), split)
    assert (failure.oracle, failure.kind) == ("unwritten", "partial_out")
    assert failure.message.startswith("partial_out[seq 0, head 0, split 3, dim 0] was never written")


def test_unwritten_row_of_a_merge(plant: Any, states: MergeStatesCase, failure_of: Any) -> None:
    """Rows whose sides are both empty could stay unwritten."""
    failure = failure_of(plant("merge_states", store_empty=nothing), states)
    assert (failure.oracle, failure.kind) == ("unwritten", "output")
    assert failure.message == "output[token 0, head 2, dim 0] was never written"


def test_accumulating_into_an_output_that_is_not_cleared(plant: Any, dense: Case, failure_of: Any) -> None:
    """`out += ...` into fresh memory would be reported as a wrong number, not as memory read before it was written."""

    def accumulate(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        inputs.out += out
        return inputs.out, lse

    failure = failure_of(plant(after=accumulate), msgspec.structs.replace(dense, seq_lens=(5, 21)))
    assert (failure.oracle, failure.kind) == ("unwritten", "read before written")
    assert "it changes 64 of 64 elements of out" in failure.details[0]


def test_reading_a_workspace_before_writing_it(plant: Any, dense: Case, failure_of: Any) -> None:
    """A workspace that is not initialised would be reported without naming it."""

    def add_workspace(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        return out + torch.empty(8).nan_to_num(0.0) * 0.5, lse

    failure = failure_of(plant(after=add_workspace), dense)
    assert (failure.oracle, failure.kind) == ("unwritten", "read before written")
    assert any("float32 [8]" in detail for detail in failure.details)


def test_a_result_that_unwritten_memory_outweighs_is_written(plant: Any, dense: Case, failure_of: Any) -> None:
    """A reduction over a split that nobody wrote would be reported as a kernel that returns no LSE."""

    def add_split(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        split = torch.empty_like(lse)  # 48.6 in the second run, against which lse rounds away in a log-sum-exp
        return out, torch.where(lse > split, lse, split)

    failure = failure_of(plant(after=add_split), msgspec.structs.replace(dense, seq_lens=(5, 21)))
    assert (failure.oracle, failure.kind) == ("unwritten", "read before written")


def test_initialised_workspace_is_not_prefilled(plant: Any, dense: Case) -> None:
    """`torch.zeros` and `torch.full` would not hold what they promise."""

    def add_zeros(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        return out + torch.zeros(8) + torch.full((8,), 2.0) - torch.ones_like(out) * 2, lse

    assert judge(plant(after=add_zeros), dense, device="cpu", relations=()).failure is None
