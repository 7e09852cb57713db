"""Scores that are declared to be stored in float16, which ends at 65504."""

from __future__ import annotations

import math

import msgspec
import torch

import attnfuzz
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.recipes import Needle, Values
from attnfuzz.trials.expectations import Expectation, expectations
from attnfuzz.values import attention_values

LARGE = Values(keys="equal", logit_exponent=8, needles=(Needle(seq=0, position=3, kv_head=0),))
CASE = DenseDecodeCase(
    num_q_heads=2, num_kv_heads=1, head_size=64, seq_lens=(7, 5), scale=2**-8, dtype="float16", values=LARGE
)


def expected(numerics: Numerics, case: DenseDecodeCase = CASE) -> Expectation:
    declaration = Declaration(name="any", problem="dense_decode", numerics=numerics)
    (found,) = expectations([(declaration, case, attention_values(case))], tolerance="bound", one_copy=True)
    return found


def test_nothing_is_expected_of_rows_whose_scores_it_cannot_hold() -> None:
    """A kernel that does as it declares would be accused of NaN; or none would be found in any row beside it."""
    found = expected(Numerics(scores="input"))
    assert found.expected.out[0].isnan().all()
    assert found.expected.lse[0].isnan().all()
    assert found.bound.out[0].isposinf().all()
    assert found.expected.out[1].isfinite().all()
    assert found.bound.out[1].isfinite().all()


def test_that_is_so_of_float16_alone_and_if_it_is_declared() -> None:
    """NaN of a kernel with a bug would be let off."""
    assert expected(Numerics()).expected.out.isfinite().all()
    wide = msgspec.structs.replace(CASE, dtype="bfloat16")
    assert expected(Numerics(scores="input"), wide).expected.out.isfinite().all()


def test_a_chain_of_unknown_length_has_a_link_for_each_key() -> None:
    """A chain of eight merges would be accused unless its kernel happens to have an option of that name."""
    declaration = attnfuzz.Numerics(partials="chained")
    case = msgspec.structs.replace(CASE, values=Values(values="normal"), seq_lens=(40, 2))
    once, chained = (expected(numerics, case).bound.out for numerics in (Numerics(), declaration))
    assert math.isclose(float((chained[0] / once[0]).max()), 20, rel_tol=0.9)
    assert torch.allclose(chained[1], once[1])  # two keys merge once
