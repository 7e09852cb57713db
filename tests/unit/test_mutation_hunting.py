"""The hunt for a mutant: its cases, and the process that confirms it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.judging.runner import Runner
from attnfuzz.mutation.hunting import CaseStream, Hunt, Hunter, spare_runner
from attnfuzz.problems.cases import encode_case
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports

ANY = Declaration(name="k", problem="dense_decode", target="k")
FEW = Declaration(
    name="m", problem="dense_decode", target="m",
    supports=Supports(dtypes=("float32",), head_sizes=(16,), max_seq_len=1, strides="contiguous", gqa_ratios=(1,)),
)  # fmt: skip


def test_the_same_cases_for_every_mutant() -> None:
    """One mutant would be hunted with other cases than the next, and no result could be had again."""
    stream = CaseStream(ANY, seed=3, device="cpu")
    with ThreadPoolExecutor(4) as pool:
        slices = list(pool.map(lambda start: stream.take(start, 40), [160, 0, 120, 40, 80, 200]))
    again = CaseStream(ANY, seed=3, device="cpu")
    assert [again.take(start, 40) for start in (160, 0, 120, 40, 80, 200)] == slices
    assert len({encode_case(case) for case in stream.take(0, 240)}) == 240
    assert CaseStream(ANY, seed=4, device="cpu").take(0, 240) != stream.take(0, 240)


def test_a_gpu_has_few_formats_at_first() -> None:
    """Every case of a mutant would have to be compiled on a GPU."""
    cases = CaseStream(ANY, seed=1, device="cuda").take(0, 100)
    assert len({(case.dtype, case.num_q_heads, case.head_size, case.options.get("tile")) for case in cases}) <= 2


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


@pytest.mark.night
def test_a_spare_is_another_process(runner: Runner, kernel: Declaration) -> None:
    """A failure would be confirmed in the process that it may come from, or in one that is not fresh any more."""
    with spare_runner(runner.sibling, [kernel]) as spare:
        taken = spare.result()
        assert "in process" in told(taken, kernel) != told(runner, kernel)
        assert taken.restarts == 0
    assert taken.resident_bytes == 0
    assert runner.resident_bytes > 0


@pytest.mark.night
def test_a_spare_that_nobody_takes_is_closed(runner: Runner, kernel: Declaration) -> None:
    """Each mutant that survives would leave a process and its GPU memory behind."""
    made: list[Runner] = []

    def make() -> Runner:
        made.append(runner.sibling())
        return made[0]

    with spare_runner(make, [kernel]):
        pass
    assert made[0].resident_bytes == 0


@pytest.mark.night
def test_what_a_spare_cannot_import_is_told_to_whoever_takes_it(runner: Runner, kernel: Declaration) -> None:
    """A failure would be confirmed by a process that never had the kernel."""
    gone = Declaration(name="gone", problem="merge_states", target=kernel.target.replace("telling.py", "gone.py"))
    with spare_runner(runner.sibling, [gone]) as spare, pytest.raises(KernelLoadError, match=r"gone\.py"):
        spare.result()


def test_a_hunt_confirms_in_its_spare(runner: Runner, kernel: Declaration) -> None:
    """On a GPU each kill would wait for CUDA to start once more."""
    streams = {kernel.target: CaseStream(kernel, seed=0, device="cpu")}
    hunter = Hunter(
        zygote=runner.zygote, device="cpu", streams=streams, oracles=runner.oracles, budget_s=30.0, hang_s=10.0
    )
    with spare_runner(runner.sibling, [kernel]) as spare:
        hunted = Hunt(hunter, runner, [kernel], spare=spare).run()
    assert hunted.kill is not None
    assert hunted.kill.failure is not None
    assert "in process" in hunted.kill.failure.message != told(runner, kernel)
    assert 0 < hunted.kill.first_seen_s < hunted.kill.seconds
    assert runner.restarts == 0
