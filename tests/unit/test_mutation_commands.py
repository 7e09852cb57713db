"""A user's command as the killer: what its exit status means, and what ends one that hangs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from attnfuzz.declaration import KernelLoadError
from attnfuzz.mutation.killers import Command


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
