"""Hunting a mutant, what counts as a kill, and the score."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.isolation.outcomes import ServiceError
from attnfuzz.judging.runner import Runner
from attnfuzz.mutation.hunting import CaseStream, Hunt, Hunter, spare_runner
from attnfuzz.mutation.killers import Command, never_runs
from attnfuzz.mutation.mutants import Kill, Mutant, MutantOutcome, Score
from attnfuzz.problems.cases import MergeStatesCase, encode_case
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Failure, Verdict

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


DECLARATION = Declaration(name="kernel", problem="merge_states")
RAISES = Verdict(failure=Failure(oracle="exception", kind="TypeError", message="the kernel raised TypeError"))
WRONG = Verdict(failure=Failure(oracle="accuracy", kind="out", message="out is wrong"))


class Executor:
    """In place of a runner: answers, or fails as the framework does, in this order."""

    def __init__(self, answers: Sequence[Verdict | ServiceError]) -> None:
        self._answers = list(answers)

    def judge(self, *arguments: Any, **named: Any) -> Verdict:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, ServiceError):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([RAISES], "the kernel raised TypeError"),
        ([RAISES, WRONG], None),
        ([RAISES, Verdict()], None),
        ([RAISES, ServiceError("unknown parameter type")], None),
    ],
    ids=["never", "wrong", "right", "damaged"],
)
def test_only_what_raises_everywhere_never_runs(answers: list[Verdict | ServiceError], said: str | None) -> None:
    """Code that is broken in some cases would not count, or one that spoils its process end in an error."""
    executor = cast(Runner, Executor(answers))
    stream = SimpleNamespace(take=lambda start, count: [MergeStatesCase(num_q_heads=1, head_size=8, num_tokens=1)])
    hunter = cast(Hunter, SimpleNamespace(streams={DECLARATION.target: stream}))
    assert never_runs(executor, hunter, [DECLARATION]) == said


def python(code: str, name: str = "") -> Command:
    """A command that runs ``code``; with ``name`` among its words."""
    return Command(shlex.join([sys.executable, "-c", code, name]))


@pytest.mark.parametrize(
    ("status", "is_pytest", "ended"),
    [(0, True, "passed"), (1, True, "failed"), (2, True, "error"), (5, True, "error"), (3, False, "failed")],
)
def test_exit_status(tmp_path: Path, status: int, is_pytest: bool, ended: str) -> None:
    """A run that collected nothing would count as a kill, or a failing script as something unknown."""
    run = python(f"print('said'); raise SystemExit({status})", "pytest" * is_pytest).run(tmp_path / "o.json")
    assert (run.ended, run.tail) == (ended, "said")


def test_a_crash_is_a_kill(tmp_path: Path) -> None:
    """A mutant that takes the tests' process down would survive."""
    assert python("import os; os.abort()", "pytest").run(tmp_path / "o.json").ended == "failed"


def test_a_hang_is_ended(tmp_path: Path) -> None:
    """A mutant that never ends would stop the measurement."""
    command = python("import time; time.sleep(600)")
    command.limit_s = 0.5
    assert command.run(tmp_path / "o.json").ended == "late"


@pytest.mark.parametrize(("line", "problem"), [("", "needs a command"), ("'", "quote it"), ("/nowhere/x", "started")])
def test_no_command(tmp_path: Path, line: str, problem: str) -> None:
    """A mistake on the command line would end in a traceback."""
    with pytest.raises(KernelLoadError, match=problem):
        Command(line).run(tmp_path / "o.json")


KILLS = (
    Kill(by="accuracy", seconds=1.0),
    Kill(by="dead_memory", seconds=3.0),
    Kill(by="dead_memory", seconds=2.0),
    Kill(by="hang", seconds=9.0),
)


def pair(outcome: MutantOutcome, operator: str = "store") -> tuple[Mutant, MutantOutcome]:
    return Mutant(operator, Path("file.py"), "f", 1, ("a",), ("b",), b"", ()), outcome


def score() -> Score:
    others = [pair(MutantOutcome(status=status)) for status in ("survived", "equivalent", "stillborn", "error")]
    return Score([*(pair(MutantOutcome(status="killed", kill=kill), "sign") for kill in KILLS), *others])


def test_only_mutants_that_could_be_killed_count() -> None:
    """Code that never runs, or an argument, would raise or lower the score."""
    assert score().share == 4 / 5
    assert (score().median_s, score().longest_s) == (2.5, 9.0)
    assert {name: part.share for name, part in score().by_operator().items()} == {"sign": 1.0, "store": 0.0}


def test_what_killed_is_counted() -> None:
    """Nobody would see which oracles a suite of mutants leaves idle."""
    assert score().by_killer() == [("dead_memory", 2), ("accuracy", 1), ("hang", 1)]
