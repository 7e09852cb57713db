"""Rows that depend on the others of their batch, within their bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.registry import OracleName
from attnfuzz.oracles.relations.catalogue import applicable
from attnfuzz.problems.cases import Case, DenseDecodeCase, MergeStatesCase
from tests.oracles.relations.objections import objection

NAMES: tuple[OracleName, ...] = ("batch_invariance",)
INVARIANT = attnfuzz.Supports(batch_invariant=True)


def in_parts_of_the_longest(plant: Any, supports: Any) -> Any:
    """Sums over parts, as many as the longest sequence of the batch asks for."""
    parts = [1]

    def look(inputs: Any) -> None:
        parts[0] = -(-int(inputs.seq_lens.max()) // 8)

    def average(weights: Tensor, v: Tensor) -> Tensor:
        size = -(-len(weights) // parts[0])
        return torch.stack([w @ x for w, x in zip(torch.split(weights, size), torch.split(v, size), strict=True)]).sum(
            0
        )

    return plant(before=look, average=average, supports=supports)


def test_splits_that_follow_the_longest_sequence(plant: Any, dense: DenseDecodeCase) -> None:
    """The same prompt would get other tokens as other users' prompts come and go, despite a promise."""
    failure = objection("batch_invariance", in_parts_of_the_longest(plant, INVARIANT), dense)
    assert failure is not None
    assert failure.kind == "bits"
    assert failure.message.startswith("out[seq 0, ")
    assert "with that sequence alone in the batch: the bits must be equal" in failure.message


def test_without_the_promise_nothing_is_compared(plant: Any, dense: DenseDecodeCase) -> None:
    """A kernel that chooses its splits by the batch, as most do, would be reported."""
    kernel = in_parts_of_the_longest(plant, attnfuzz.Supports())
    assert not applicable(kernel.declaration, dense, NAMES)
    assert judge(kernel, dense, device="cpu", relations=NAMES).failure is None


@pytest.mark.parametrize("layout", ["HT", "TH"])
def test_rows_of_merged_states_are_told_apart(layout: Any, plant: Any, states: MergeStatesCase) -> None:
    """The LSE of another token would be compared: a false alarm, or a kernel that mixes tokens up passes."""
    case = msgspec.structs.replace(states, lse_layout=layout)
    supports = attnfuzz.Supports(batch_invariant=True, lse_layout=layout)
    assert judge(plant("merge_states", supports=supports), case, device="cpu", relations=NAMES).failure is None

    def nudge_if_many(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        rows = lse if layout == "TH" else lse.T
        rows[1:, 0] *= 1 + 2**-23
        return out, lse

    failure = objection("batch_invariance", plant("merge_states", supports=supports, after=nudge_if_many), case)
    assert failure is not None
    assert "token 1" in failure.message
    assert "head 0" in failure.message


@pytest.mark.parametrize("fixture", ["dense", "paged", "split"])
def test_correct_kernels_do_not_notice(fixture: str, plant: Any, request: pytest.FixtureRequest) -> None:
    """A false alarm: a row was compared with another one, or lost its tokens on the way."""
    case: Case = request.getfixturevalue(fixture)
    kernel = plant(case.problem, supports=INVARIANT)
    assert applicable(kernel.declaration, case, NAMES)
    assert judge(kernel, case, device="cpu", relations=NAMES).failure is None


def test_of_many_rows_a_few_run_alone(plant: Any, dense: DenseDecodeCase) -> None:
    """A case of a thousand sequences would take a thousand runs."""
    alone: list[int] = []

    def note(inputs: Any) -> None:
        if len(inputs.seq_lens) == 1:
            alone.append(int(inputs.seq_lens))

    case = msgspec.structs.replace(dense, seq_lens=(5, 6, 0, 2, 7, 9, 4))
    assert judge(plant(supports=INVARIANT, before=note), case, device="cpu", relations=NAMES).failure is None
    assert sorted(alone) == [2, 4, 5, 9]
