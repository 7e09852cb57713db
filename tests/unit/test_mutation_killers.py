"""What a mutant is put to: whether it runs at all, and commands that kill."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.isolation.outcomes import ServiceError
from attnfuzz.judging.runner import Runner
from attnfuzz.mutation.hunting import Hunter
from attnfuzz.mutation.killers import Command, never_runs
from attnfuzz.problems.cases import MergeStatesCase
from attnfuzz.verdict import Failure, Verdict

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
