"""Killers of mutants: attnfuzz's own search, or a command of the user's with the mutant laid over the sources."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.isolation.outcomes import ServiceError
from attnfuzz.judging.runner import Runner
from attnfuzz.mutation.hunting import Hunt, Hunted, Hunter, spare_runner
from attnfuzz.mutation.mutants import Kill, Mutant, MutantOutcome
from attnfuzz.oracles.registry import EXCEPTION
from attnfuzz.overlay import VARIABLE, namesake
from attnfuzz.problems.cases import Case

_SAMPLE = (0, 4, 20, 60, 110, 170)
"""Cases from the simplest on: code that raises in all of them never runs at all."""


class Killer(Protocol):
    """Finds out what becomes of a mutant that ``overlay`` lays over the sources."""

    def __call__(self, mutant: Mutant, overlay: Path) -> MutantOutcome: ...


class SearchKiller:
    """Hunts with ``hunter``."""

    def __init__(self, hunter: Hunter) -> None:
        self._hunter = hunter

    def __call__(self, mutant: Mutant, overlay: Path) -> MutantOutcome:
        """Hunt the mutant on all kernels that run it."""
        with self._hunter.runner({VARIABLE: str(overlay)}) as runner:
            if (reason := fails_to_load(runner, mutant.kernels)) is not None:
                return MutantOutcome(status="stillborn", detail=reason)
            # on a CPU a fresh process takes milliseconds
            is_slow = self._hunter.device != "cpu"
            with spare_runner(runner.sibling, mutant.kernels) if is_slow else nullcontext() as spare:
                runner.kernels.start_device()  # seconds count from the first case
                hunted = Hunt(self._hunter, runner, mutant.kernels, spare=spare).run()
            kill = hunted.kill
            if kill is None:
                return _survived(hunted)
            if kill.by == EXCEPTION.name and (reason := never_runs(runner, self._hunter, mutant.kernels)) is not None:
                return MutantOutcome(status="stillborn", seconds=hunted.seconds, cases=hunted.cases, detail=reason)
        return MutantOutcome(status="killed", seconds=hunted.seconds, cases=hunted.cases, kill=kill)


class CommandKiller:
    """Runs ``command``; ``hunter`` only finds out whether the mutant runs at all."""

    def __init__(self, command: Command, hunter: Hunter) -> None:
        self._command = command
        self._hunter = hunter

    def __call__(self, mutant: Mutant, overlay: Path) -> MutantOutcome:
        """Run the command once."""
        with self._hunter.runner({VARIABLE: str(overlay)}) as runner:
            reason = fails_to_load(runner, mutant.kernels) or never_runs(runner, self._hunter, mutant.kernels)
        if reason is not None:
            return MutantOutcome(status="stillborn", detail=reason)
        run = self._command.run(overlay)
        match run.ended:
            case "passed":
                return MutantOutcome(status="survived", seconds=run.seconds)
            case "error":
                return MutantOutcome(
                    status="error", seconds=run.seconds, detail=f"the command could not tell:\n{run.tail}"
                )
            case _:
                by = "time limit" if run.ended == "late" else "command"
                return MutantOutcome(status="killed", seconds=run.seconds, kill=Kill(by=by, seconds=run.seconds))


def fails_to_load(runner: Runner, kernels: Sequence[Declaration]) -> str | None:
    """Why the kernels cannot be imported; None if they can."""
    try:
        runner.kernels.import_known(kernels)
    except KernelLoadError as error:
        return str(error)
    return None


def never_runs(runner: Runner, hunter: Hunter, kernels: Sequence[Declaration]) -> str | None:
    """The exception that every kernel raises in every case of a sample; None if one does not.

    Nor does one that leaves a process in which attnfuzz fails: it has written where nothing was its own.
    """
    message = None
    for declaration in kernels:
        for case in _sample(hunter, declaration):
            try:
                failure = runner.judge(declaration, case, run_twice=False, relations=()).failure
            except ServiceError:
                return None
            if failure is None or failure.oracle != EXCEPTION.name:
                return None
            message = failure.message
    return message


def _sample(hunter: Hunter, declaration: Declaration) -> list[Case]:
    stream = hunter.streams[declaration.target]
    return [case for place in _SAMPLE for case in stream.take(place, 1)]


def _survived(hunted: Hunted) -> MutantOutcome:
    return MutantOutcome(
        status="survived", seconds=hunted.seconds, cases=hunted.cases, detail="; ".join(hunted.complaints)
    )


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
        """How the command ended. Of pytest's exit statuses only 1 says that a test has failed (its documentation)."""
        if status == 0:
            return "passed"
        return "failed" if status == _TESTS_FAILED or status < 0 or not self._is_pytest else "error"


def _unseen(wanted: Mapping[str, str], seen: Sequence[str]) -> str:
    """A sentence on a command that loads none of the files ``wanted``, which have names, but possibly others."""
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
