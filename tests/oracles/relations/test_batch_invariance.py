"""Rows that depend on the others of their batch, within their bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.registry import DEFAULT_ORACLES, OracleName
from attnfuzz.oracles.relations.catalogue import applicable, drawn
from attnfuzz.problems.cases import Case, DenseDecodeCase, MergeStatesCase, PagedDecodeCase
from attnfuzz.problems.variants import Variant
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_last_digits_of_sums_show_in_any_dtype(dtype: Any, plant: Any, paged: PagedDecodeCase) -> None:
    """Splits by all tokens of a batch would show in float32 results alone, of which engines have none."""

    def look(inputs: Any) -> None:
        parts[0] = max(1, int(inputs.seq_lens.sum()) // 8)

    def average(weights: Tensor, v: Tensor) -> Tensor:
        sums = [w @ x for w, x in zip(torch.split(weights, parts[0]), torch.split(v, parts[0]), strict=True)]
        return torch.stack(sums).sum(0)

    parts = [1]
    case = msgspec.structs.replace(paged, seq_lens=(40, 21), dtype=dtype)
    kernel = plant("paged_decode", before=look, average=average, supports=INVARIANT)
    failure = objection("batch_invariance", kernel, case)
    assert failure is not None
    assert "among others, but" in failure.message


def test_a_sequence_without_others_is_set_among_some(plant: Any, paged: PagedDecodeCase) -> None:
    """Half of all cases, which have one sequence, would say nothing of a promise about batches."""

    def nudge_if_many(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        return (out, lse * (1 + 2**-20)) if len(inputs.seq_lens) > 1 else (out, lse)

    case = msgspec.structs.replace(paged, seq_lens=(9,))
    assert objection("batch_invariance", plant("paged_decode", supports=INVARIANT, after=nudge_if_many), case)
    assert objection("batch_invariance", plant("paged_decode", supports=INVARIANT), case) is None


def test_batches_are_tried_where_a_variant_is_asked_for(plant: Any, paged: PagedDecodeCase) -> None:
    """A promise that is kept but for windows would be tried in one case of hundreds."""
    kernel = plant("paged_decode", supports=attnfuzz.Supports(batch_invariant=True, variants=("window",)))
    window = msgspec.structs.replace(paged, variant=Variant(window=3))
    cases = [msgspec.structs.replace(window, scale=1 / (1 + i)) for i in range(200)]
    chosen = [drawn(kernel.declaration, case, DEFAULT_ORACLES) for case in cases]
    assert sum(one is not None and one.name == "batch_invariance" for one in chosen) > 20
