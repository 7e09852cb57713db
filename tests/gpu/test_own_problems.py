"""Users' problems on a GPU: written on the host, judged on the device, and one that raises costs its kernels alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import attnfuzz
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.strategies import cases
from tests.cases.test_own_problems import KERNELS, check_others_are_searched
from tests.common.drawing import drawn_from
from tests.families import cache_write_kernels, wide_kernels
from tests.judged_batches import judge_each


def test_a_problem_that_raises_costs_its_kernels_alone(tmp_path: Path) -> None:
    """One mistake in a user's `write` would end the search of all kernels, or a host's tensor meet one of the GPU."""
    check_others_are_searched(tmp_path, "cuda", "40s")


@pytest.mark.parametrize("name", ["right", "in_triton"])
def test_what_is_written_on_the_host_arrives(name: str, runner: Runner) -> None:
    """A right kernel would get other numbers, or dead memory with the same in every run."""
    (declaration,) = runner.declarations([f"{KERNELS}:{name}"])
    case = simplest_case(declaration.problem, declaration.supports, declaration.options)
    assert runner.judge(declaration, case, relations="all").failure is None


@pytest.mark.parametrize("name", ["cache_write", "sparse_decode", "recurrent_decode"])
def test_cases_are_judged_together_as_alone(name: str, runner: Runner) -> None:
    """What comes back in one copy would be another case's, or a stray write into a cache be lost in it."""
    (declaration,) = runner.declarations([f"attnfuzz.families.{name}_kernels:{name}"])
    drawn = drawn_from(cases(declaration.problem, supports=declaration.supports), draws=40)
    assert [one.failure for one in judge_each(runner, declaration, drawn, timeout_s=200)] == [None] * len(drawn)


@pytest.mark.parametrize("bug", ["padding", "token", "packed"])
def test_bugs_show_in_a_batch_as_alone(bug: str, runner: Runner) -> None:
    """A batch on a GPU would hide what a case by itself shows."""
    (declaration,) = runner.declarations([f"{cache_write_kernels.__file__}:{bug}"])
    drawn = drawn_from(cases(declaration.problem, supports=declaration.supports), draws=60)
    together = [one.failure for one in judge_each(runner, declaration, drawn, timeout_s=200)]
    alone = [runner.judge(declaration, case, relations=()).failure for case in drawn]
    pairs = [(one, other) for one, other in zip(together, alone, strict=True) if other is not None]
    assert pairs
    oracles = [(one and one.oracle, other.oracle) for one, other in pairs]
    # A slot of two tokens has either's, in torch's order of the moment: then runs differ before anything else does.
    assert not [both for both in oracles if len({*both}) > 1 and "determinism" not in both]
    assert all(one for one, other in oracles if other != "determinism")


@pytest.mark.parametrize("name", ["write", "attend"])
def test_offsets_of_32_bits_are_found_in_larger_tensors(name: str) -> None:
    """A writer or reader whose offsets wrap in a cache of gigabytes would pass on the machine that has such caches."""

    @attnfuzz.fuzz(getattr(wide_kernels, f"{name}_narrow"), max_examples=200, device="cuda")
    def search() -> None:
        pass

    with pytest.raises(attnfuzz.KernelFailure) as caught:
        search()
    assert (caught.value.failure.oracle, caught.value.failure.cause) == ("page_relocation", "narrow_offsets")
    attnfuzz.fuzz(getattr(wide_kernels, f"{name}_wide"), max_examples=60, device="cuda")(lambda: None)()
