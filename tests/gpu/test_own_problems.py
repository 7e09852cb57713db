"""Users' problems on a GPU: written on the host, judged on the device, and one that raises costs its kernels alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnfuzz.judging.runner import Runner
from attnfuzz.problems.simplest import simplest_case
from tests.unit.test_own_problems import KERNELS, check_others_are_searched


def test_a_problem_that_raises_costs_its_kernels_alone(tmp_path: Path) -> None:
    """One mistake in a user's `write` would end the search of all kernels, or a host's tensor meet one of the GPU."""
    check_others_are_searched(tmp_path, "cuda", "40s")


@pytest.mark.parametrize("name", ["right", "in_triton"])
def test_what_is_written_on_the_host_arrives(name: str, runner: Runner) -> None:
    """A right kernel would get other numbers, or dead memory with the same in every run."""
    (declaration,) = runner.declarations([f"{KERNELS}:{name}"])
    case = simplest_case(declaration.problem, declaration.supports, declaration.options)
    assert runner.judge(declaration, case, relations="all").failure is None
