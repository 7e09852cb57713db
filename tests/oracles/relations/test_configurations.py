"""Autotuned kernels that are wrong with a configuration that the tuner does not take here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import attnfuzz
from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.relations import configurations as configurations_relation
from attnfuzz.oracles.relations.configurations import CONFIGURATIONS
from attnfuzz.problems.recipes import Values
from attnfuzz.trials.trial import Trial
from attnfuzz.triton_compat import configurations
from tests.sample_cases import dense_case

from .objections import objection

KERNELS = Path(__file__).with_name("tuned_kernels.py")
CASE = dense_case(seq_lens=(5, 2), dtype="float32", values=Values(keys="normal", values="normal"))


def kernel(name: str) -> Kernel:
    (found,) = load_kernels(f"{KERNELS}:{name}")
    return found


def test_the_configuration_that_is_wrong_is_told() -> None:
    """A tile size that is chosen on one machine only would be wrong there, and nowhere where anybody looks."""
    failure = objection("configurations", kernel("skips_a_tile"), CASE)
    assert failure is not None
    assert failure.message.endswith(
        "wrong with BLOCK_N=64, num_warps=4 of _attend and with BLOCK_N=64, num_warps=8 of _attend; "
        "right with the 4 others"
    )
    assert "expected" in failure.message
    assert failure.blame.rows == ((0, 0),)


def test_what_only_another_fill_of_memory_shows_is_found() -> None:
    """A mask that one configuration lacks is right with zeros behind a sequence, as tests have them."""
    failure = objection("configurations", kernel("unmasked_in_one"), CASE)
    assert failure is not None
    assert "memory that holds no token" in failure.message
    assert failure.message.endswith("right with the 4 others")


def test_of_two_autotuned_functions_the_wrong_one_is_told() -> None:
    """Whoever has several would not know where to look."""
    failure = objection("configurations", kernel("two_stages"), CASE)
    assert failure is not None
    assert failure.message.endswith("wrong with BLOCK=2 of scaled; right with the 7 others")


def test_a_kernel_that_adds_in_place_is_wrong_where_its_tuner_times_it() -> None:
    """A server's first request, and the cache that it fills, would be wrong: of a state that is changed in place."""
    failure = objection("configurations", kernel("adds_in_place"), CASE)
    assert failure is not None
    assert failure.message.endswith("wrong at a first call, where triton.autotune times all of them on its tensors")
    assert any("restore_value or reset_to_zero" in one for one in failure.details)


def test_of_a_case_that_fails_by_itself_explain_tells_with_which_configurations() -> None:
    """Whoever repairs a kernel that fails here would not know whether all configurations do."""
    (line,) = configurations_relation.lines_of(kernel("wrong_with_the_first"), CASE, device="cpu")
    assert line == "wrong with BLOCK_N=64, num_warps=4 of _attend; right with the 2 others"
    assert configurations_relation.lines_of(kernel("right"), CASE, device="cpu") == ()


@pytest.mark.parametrize("name", ["right", "pruned", "static_assert", "resets", "restores"])
def test_a_kernel_that_is_right_with_all_it_may_take_is_silent(name: str) -> None:
    """What a kernel's own pruning leaves out, or a static assertion refuses, never runs on a GPU either."""
    verdict = judge(kernel(name), CASE, device="cpu", relations=("configurations",))
    assert verdict.failure is None
    assert verdict.related == ("configurations",)


def test_of_a_kernel_that_raises_nothing_is_said() -> None:
    """Its explanation would end as an error of attnfuzz's own, and its finding without any."""

    def raises(inputs: Any) -> None:
        raise ValueError(inputs.head_size)

    raising = attnfuzz.kernel("dense_decode")(raises)
    assert configurations_relation.lines_of(raising, CASE, device="cpu") == ()


def test_a_drawn_case_tries_some_of_many_and_other_cases_others() -> None:
    """A kernel with a hundred configurations would take all of a search's time for one case, or never try most."""
    many = kernel("of_many")
    found: set[bool] = set()
    for seed in range(12):
        if len(found) == 2:
            break
        case = msgspec.structs.replace(CASE, values=msgspec.structs.replace(CASE.values, seed=seed))
        found.add(CONFIGURATIONS.check(Trial(many, case, device="cpu", tolerance="bound")) is None)
    assert found == {True, False}
    assert judge(many, CASE, device="cpu", relations=("configurations",)).failure is not None


def test_kernels_that_tune_nothing_are_not_run_again() -> None:
    """They would be told to have passed what says nothing of them, in place of another relation."""
    (plain,) = load_kernels("dense_eager")
    for _ in range(2):
        assert judge(plain, CASE, device="cpu", relations=("configurations",)).related == ()
    assert not CONFIGURATIONS.applies(plain.declaration, CASE)


def test_an_unknown_triton_has_no_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that is built differently would raise in each case."""

    class Autotuner:
        def run(self, grid: object) -> object:
            return grid

    declaration = kernel("right").declaration
    monkeypatch.setattr(sys.modules["triton.runtime.autotuner"], "Autotuner", Autotuner)
    assert configurations.tuned_calls() is None
    assert not CONFIGURATIONS.applies(declaration, CASE)
