"""attnfuzz.mutation.hunting: a fresh process that is ready before it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.judging.runner import Runner
from attnfuzz.mutation.hunting import CaseStream, Hunt, Hunter, Spare
from attnfuzz.problems.simplest import simplest_case

TELLS_ITS_PROCESS = """
import os

import attnfuzz


@attnfuzz.kernel("merge_states")
def telling(inputs):
    raise ValueError(f"in process {os.getpid()}")
"""


@pytest.fixture
def runner() -> Iterator[Runner]:
    with Runner(device="cpu") as runner:
        yield runner


@pytest.fixture
def kernel(tmp_path: Path, runner: Runner) -> Declaration:
    path = tmp_path / "telling.py"
    path.write_text(TELLS_ITS_PROCESS)
    (declaration,) = runner.declarations([str(path)])
    return declaration


def told(runner: Runner, kernel: Declaration) -> str:
    failure = runner.judge(kernel, simplest_case("merge_states", kernel.supports, {})).failure
    assert failure is not None
    return failure.message


def test_a_spare_is_another_process_and_taken_once(runner: Runner, kernel: Declaration) -> None:
    """A failure would be confirmed in the process that it may come from, or in one that is not fresh any more."""
    with Spare(runner.sibling, [kernel]) as spare:
        taken = spare.take()
        assert taken is not None
        assert "in process" in told(taken, kernel) != told(runner, kernel)
        assert taken.restarts == 0
        assert spare.take() is None
    assert taken.resident_bytes == 0
    assert runner.resident_bytes > 0


def test_a_spare_that_nobody_takes_is_closed(runner: Runner, kernel: Declaration) -> None:
    """Each mutant that survives would leave a process and its GPU memory behind."""
    made: list[Runner] = []

    def make() -> Runner:
        made.append(runner.sibling())
        return made[0]

    with Spare(make, [kernel]):
        pass
    assert made[0].resident_bytes == 0


def test_what_a_spare_cannot_import_is_told_to_whoever_takes_it(runner: Runner, kernel: Declaration) -> None:
    """A failure would be confirmed by a process that never had the kernel."""
    gone = Declaration(name="gone", problem="merge_states", target=kernel.target.replace("telling.py", "gone.py"))
    with Spare(runner.sibling, [gone]) as spare, pytest.raises(KernelLoadError, match=r"gone\.py"):
        spare.take()


def test_a_hunt_confirms_in_its_spare(runner: Runner, kernel: Declaration) -> None:
    """On a GPU each kill would wait for CUDA to start once more."""
    streams = {kernel.target: CaseStream(kernel, seed=0, device="cpu")}
    hunter = Hunter(
        zygote=runner.zygote, device="cpu", streams=streams, oracles=runner.oracles, budget_s=30.0, hang_s=10.0
    )
    with Spare(runner.sibling, [kernel]) as spare:
        hunted = Hunt(hunter, runner, [kernel], spare=spare).run()
        assert spare.take() is None
    assert hunted.kill is not None
    assert hunted.kill.failure is not None
    assert "in process" in hunted.kill.failure.message != told(runner, kernel)
    assert 0 < hunted.kill.first_seen_s < hunted.kill.seconds
    assert runner.restarts == 0
