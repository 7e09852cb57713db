"""Merges that break a law, within their bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from torch import Tensor

import attnfuzz
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.registry import OracleName
from attnfuzz.oracles.relations.catalogue import applicable
from attnfuzz.problems.cases import MergeStatesCase
from tests.oracles.relations.objections import objection

NAMES: tuple[OracleName, ...] = ("merge_laws",)


def test_an_empty_state_that_counts_a_little(plant: Any, states: MergeStatesCase) -> None:
    """A sequence without a suffix would not get the prefix's result, and no bound is that tight."""

    def average(weights: Tensor, sides: Tensor) -> Tensor:
        return weights @ sides / (weights.sum() + 2e-7)

    failure = objection("merge_laws", plant("merge_states", average=average), states)
    assert failure is not None
    assert failure.kind == "bits"
    assert failure.message.startswith("output[")
    assert "in the state that holds tokens, but " in failure.message
    assert "merged with an empty state: the bits must be equal" in failure.message


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["HT", "TH"])
def test_correct_kernels_do_not_notice(layout: Any, dtype: Any, plant: Any, states: MergeStatesCase) -> None:
    """A false alarm: the other state was compared, or a row without any."""
    case = msgspec.structs.replace(states, lse_layout=layout, dtype=dtype)
    kernel = plant("merge_states", supports=attnfuzz.Supports(lse_layout=layout))
    assert applicable(kernel.declaration, case, NAMES)
    assert judge(kernel, case, device="cpu", relations=NAMES).failure is None


def test_kernels_without_empty_states_are_not_given_any(plant: Any, states: MergeStatesCase) -> None:
    """A kernel would get input that it never promised to take."""
    for supports in (attnfuzz.Supports(empty_sequences=False), attnfuzz.Supports(empty_state_lse=("+inf",))):
        assert not applicable(plant("merge_states", supports=supports).declaration, states, NAMES)
