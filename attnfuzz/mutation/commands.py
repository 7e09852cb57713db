"""A command of the user's as the killer: it runs with a mutant laid over the sources, and fails or does not."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attnfuzz.declaration import KernelLoadError
from attnfuzz.overlay import VARIABLE, namesake

__all__ = ["Command", "CommandRun"]

_PYTEST = ("pytest", "py.test")
_TESTS_FAILED = 1
_TAIL_LINES = 12
_LEAST_LIMIT_S = 30.0
_SLOWER = 5.0
"""Times the run without a mutant: what takes longer hangs."""
_FIRST_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class CommandRun:
    """How a run ended. ``tail``: the last lines that it wrote."""

    ended: Literal["passed", "failed", "error", "late"]
    seconds: float
    tail: str


class Command:
    """A command line, run without a shell in the working directory. Raises KernelLoadError for one that is empty."""

    def __init__(self, line: str) -> None:
        self.line = line
        try:
            self._words: Sequence[str] = shlex.split(line)
        except ValueError as error:
            raise KernelLoadError(f"--with {line!r} is no command line ({error}); quote it as for a shell") from error
        if not self._words:
            raise KernelLoadError("--with needs a command, such as 'pytest tests/test_mine.py'")
        self._is_pytest = any(Path(word).name in _PYTEST for word in self._words)
        self.limit_s = _FIRST_LIMIT_S
        self._running: set[subprocess.Popen[bytes]] = set()

    def close(self) -> None:
        """Kill what is still running."""
        for process in list(self._running):
            _kill(process)

    def check(self, overlay: Path, loaded: Path, files: Sequence[Path]) -> None:
        """Run it on the sources as they are, laid over themselves, which it must pass and load.

        Raises KernelLoadError where the command fails without a mutant, or never loads one of ``files`` through
        attnfuzz, so that no mutant could ever fail it.
        """
        run = self.run(overlay)
        if run.ended != "passed":
            raise KernelLoadError(
                f"{self.line!r} does not pass without a mutant; repair it first. It wrote:\n{run.tail}"
            )
        seen = loaded.read_text(encoding="utf-8").splitlines() if loaded.exists() else []
        wanted = {os.path.realpath(file): file.name for file in files}
        if not wanted.keys() & set(seen):
            raise KernelLoadError(f"{self.line!r} {_unseen(wanted, seen)}. It wrote:\n{run.tail}")
        self.limit_s = max(_LEAST_LIMIT_S, _SLOWER * run.seconds)

    def run(self, overlay: Path) -> CommandRun:
        """Run it with an overlay in force, for a limited time."""
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                self._words,
                env=os.environ | {VARIABLE: str(overlay)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise KernelLoadError(f"--with {self.line!r} cannot be started: {error.strerror}") from error
        self._running.add(process)
        is_late = False
        with process:
            try:
                output, _ = process.communicate(timeout=self.limit_s)
            except subprocess.TimeoutExpired:
                is_late = True
                _kill(process)
                output, _ = process.communicate()
            finally:
                _kill(process)
                self._running.discard(process)
        ended = "late" if is_late else self._ended(process.returncode)
        return CommandRun(ended, time.monotonic() - started, _tail(output))

    def _ended(self, status: int) -> Literal["passed", "failed", "error"]:
        """Of pytest's exit statuses only 1 says that a test has failed (pytest documentation, "Exit codes")."""
        if status == 0:
            return "passed"
        return "failed" if status == _TESTS_FAILED or status < 0 or not self._is_pytest else "error"


def _unseen(wanted: Mapping[str, str], seen: Sequence[str]) -> str:
    """What to say of a command that loads none of the files ``wanted``, which have names, but possibly others."""
    for other in seen:
        if original := namesake(other, wanted):
            return (
                f"loads {other} in place of {original}, so that no mutant of that could fail it; make its tests import "
                "that file, with PYTHONPATH or an editable installation, or name the other one's kernel"
            )
    return (
        f"does not load {', '.join(sorted(set(wanted.values())))} with attnfuzz's pytest plugin in force, so that no "
        "mutant could fail it; name a pytest command whose tests import these files, without -p no:attnfuzz"
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and what it has started."""
    with suppress(ProcessLookupError, PermissionError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)


def _tail(output: bytes) -> str:
    return "\n".join(output.decode(errors="backslashreplace").rstrip().splitlines()[-_TAIL_LINES:])
