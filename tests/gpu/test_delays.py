"""Kernels that are right at the usual pace only: found where programs and warps wait, or on another stream."""

from __future__ import annotations

import pytest

from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.recipes import Values
from tests.gpu.bundled_cases import BUNDLED, CASES, fitted
from tests.quality.schedules import RACES

_TIMES = 3
"""On a GPU that others use, a run at the usual pace shows the race now and then."""
SMALL = DenseDecodeCase(
    num_q_heads=4,
    num_kv_heads=4,
    head_size=16,
    seq_lens=(37, 5, 64),
    scale=0.25,
    dtype="float32",
    values=Values(keys="normal", values="normal"),
)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("cleared_by_other_programs", SMALL),
        ("launched_on_the_default_stream", SMALL),
        ("values_copied_on_a_stream", SMALL),
    ],
)
def test_a_race_that_no_other_run_shows_is_found(runner: Runner, name: str, case: DenseDecodeCase) -> None:
    """It would show on a busy server first."""
    (declaration,) = runner.declarations([f"{RACES}:{name}"])
    usual, delayed = (
        [runner.judge(declaration, case, relations=relations).failure for _ in range(_TIMES)]
        for relations in ((), ("delays",))
    )
    assert None in usual
    assert all(delayed)
    assert "delays" in {failure.oracle for failure in delayed if failure is not None}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("stored_behind_a_barrier", SMALL),
        ("stored_by_one_program", SMALL),
        ("copied_behind_the_caller", SMALL),
        ("waits_for_all_programs", SMALL),
        ("added_by_atomics", SMALL),
    ],
)
def test_programs_that_wait_for_one_another_are_right(runner: Runner, name: str, case: DenseDecodeCase) -> None:
    """Whoever takes care of what others may do would be accused."""
    (declaration,) = runner.declarations([f"{RACES}:{name}"])
    assert runner.judge(declaration, case, relations=("delays",)).failure is None


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_kernels_are_right_whatever_waits(runner: Runner, name: str) -> None:
    """A false alarm on any of them would make the oracle useless."""
    (declaration,) = runner.declarations([name])
    case = fitted(declaration, CASES[BUNDLED[name]])
    assert runner.judge(declaration, case, relations=("delays",)).failure is None
