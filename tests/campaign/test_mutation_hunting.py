"""Hunting a mutant: copies of sources in place of the originals, what counts as a kill, and the score."""

from __future__ import annotations

import importlib
import inspect
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from attnfuzz.declaration import Declaration, KernelLoadError, load_kernels
from attnfuzz.isolation.outcomes import ServiceError
from attnfuzz.judging.runner import Runner
from attnfuzz.mutation.hunting import CaseStream, Hunt, Hunter, spare_runner
from attnfuzz.mutation.killers import Command, never_runs
from attnfuzz.mutation.mutants import Kill, Mutant, MutantOutcome, Score
from attnfuzz.overlay import VARIABLE, OverlayError, install_overlay, original_of, write_overlay
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


KERNEL = """
import attnfuzz
from overlaid_helper import NAME

@attnfuzz.kernel("merge_states", name=NAME)
def kernel(inputs):
    return None
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A kernel file and its neighbour, and an overlay of the neighbour that is in force."""
    (tmp_path / "overlaid_kernel.py").write_text(KERNEL)
    (tmp_path / "overlaid_helper.py").write_text("NAME = 'original'\n\ndef where():\n    return 'original'\n")
    (tmp_path / "copies").mkdir()
    copy = tmp_path / "copies" / "changed.py"
    copy.write_text("NAME = 'changed'\n\ndef where():\n    return 'changed'\n")
    write_overlay(tmp_path / "o.json", {tmp_path / "overlaid_helper.py": copy}, loaded=tmp_path / "loaded")
    before = set(sys.modules)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "o.json"))
    monkeypatch.syspath_prepend(str(tmp_path))
    install_overlay()
    yield tmp_path
    monkeypatch.delenv(VARIABLE, raising=False)
    install_overlay()
    for name in set(sys.modules) - before:
        if name.startswith(("overlaid_", "attnfuzz_user_")):
            del sys.modules[name]


def test_the_copy_runs_under_the_name_of_the_original(project: Path) -> None:
    """Triton would compile the original's source, or the module would not find the files beside it."""
    module = importlib.import_module("overlaid_helper")
    assert module.NAME == "changed"
    assert module.__file__ == str(project / "overlaid_helper.py")
    assert module.where.__code__.co_filename == str(project / "copies" / "changed.py")
    assert "'changed'" in inspect.getsource(module.where)
    assert (project / "loaded").read_text().splitlines() == [str(project / "overlaid_helper.py")]


def test_a_kernel_file_given_by_path_is_replaced_too(project: Path) -> None:
    """A mutant of the file on the command line itself would never run."""
    file = project / "overlaid_kernel.py"
    copy = project / "copies" / "kernel.py"
    copy.write_text(KERNEL.replace("name=NAME", "name='mutant'"))
    write_overlay(project / "o.json", {file: copy})
    install_overlay()
    (kernel,) = load_kernels(str(file))
    assert kernel.declaration.name == "mutant"
    assert original_of(kernel.function.__code__.co_filename) == str(file)


def test_executors_load_the_copy(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants would be judged as if nothing had been changed."""
    overlay = str(project / "o.json")
    monkeypatch.delenv(VARIABLE)
    with Runner(device="cpu") as plain, Runner(environment={VARIABLE: overlay}, zygote=plain.zygote) as mutated:
        names = [one.declarations([str(project / "overlaid_kernel.py")])[0].name for one in (plain, mutated)]
    assert names == ["original", "changed"]


def test_a_pytest_run_loads_the_copy(project: Path) -> None:
    """A user's own tests could not be the killer."""
    (project / "test_it.py").write_text(
        "import overlaid_helper\ndef test(): assert overlaid_helper.NAME == 'changed'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(project), "test_it.py"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


def test_no_overlay_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken overlay would end in a traceback, or be ignored and every mutant survive."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "missing.json"))
    with pytest.raises(OverlayError, match=r"missing\.json' is not an overlay .* unset it"):
        install_overlay()
