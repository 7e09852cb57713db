"""Batches of cases in a process under compute-sanitizer: what it is told, what it writes down, and what came of it.

Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec

from attnfuzz import safe_start
from attnfuzz.declaration import Declaration
from attnfuzz.own_files import OwnFolder, write_file
from attnfuzz.problems.cases import Case, Problem, encode_case
from attnfuzz.sanitizer.report import SanitizerReport, is_complete, read_reports, unread_headers

Tool = Literal["memcheck", "racecheck", "initcheck", "synccheck"]
TOOLS: tuple[Tool, ...] = get_args(Tool)

ERROR_EXIT_CODE = 86
"""Exit code of compute-sanitizer if it has found something and the command itself has succeeded."""

_NAME = "compute-sanitizer"
_CUDA = Path("/usr/local/cuda")
_OPTIONS: dict[Tool, tuple[str, ...]] = {
    # Errors of API calls are part of the life of torch and Triton, who ask for what a driver may not have. Padding
    # keeps what is far outside one allocation from being inside the next.
    "memcheck": ("--report-api-errors", "no", "--padding", "1024"),
    "racecheck": ("--racecheck-detect-level", "error"),  # several threads that write the same value do no harm
    "initcheck": (),
    "synccheck": (),
}


class SanitizerUnavailable(Exception):  # noqa: N818 - a condition with a remedy
    """compute-sanitizer is not there, or cannot do its work here; the message is one sentence."""


def find_executable() -> Path:
    """The executable on PATH, else that of CUDA_HOME or /usr/local/cuda. Raises SanitizerUnavailable."""
    on_path = shutil.which(_NAME)
    if on_path is not None:
        return Path(on_path)
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]
    places = [home / folder / _NAME for home in (*homes, _CUDA) for folder in ("bin", "compute-sanitizer")]
    for place in places:
        if os.access(place, os.X_OK) and place.is_file():
            return place
    looked = ", ".join(map(str, dict.fromkeys(places)))
    raise SanitizerUnavailable(
        f"{_NAME} is not installed: it is neither on PATH nor at {looked}; install the CUDA toolkit, or set CUDA_HOME"
    )


def command_line(executable: Path, tool: Tool, log: Path, command: Sequence[str]) -> list[str]:
    """The command that runs `command` under `tool`, with the report in `log`."""
    options = ["--tool", tool, *_OPTIONS[tool], "--log-file", str(log), "--error-exitcode", str(ERROR_EXIT_CODE)]
    # The command itself uses CUDA; Triton's compilers, which it starts, do not.
    return [str(executable), *options, "--target-processes", "application-only", "--launch-timeout", "120", *command]


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`cases` of one kernel, to run one after the other on `device`; notes go to the file `notes`."""

    target: str
    problem: Problem
    cases: tuple[msgspec.Raw, ...]
    device: str
    notes: str


class TensorBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where a tensor lies, in bytes."""

    name: str
    start: int
    nbytes: int


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A case is about to run (`tensors` are there), has `done` so, or has `raised`. `kind`: the exception's type."""

    case: int
    tensors: tuple[TensorBytes, ...] = ()
    done: bool = False
    raised: str | None = None
    kind: str = ""


def read_notes(path: Path) -> list[Note]:
    """The notes that have been written; a last line that was cut off with its process is left out."""
    if not path.exists():
        return []
    complete = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=Note) for line in complete]


START_S = 240.0
CASE_S = 120.0
"""Seconds that a process may take to start, and a case more: memcheck slows compiled kernels down 65 times."""

_ENVIRONMENT = {
    # The allocator of torch takes large blocks from CUDA and gives out parts of them: all of a block is memory that
    # may be touched, as far as the sanitizer knows. Without it each tensor is an allocation of CUDA's.
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "TRITON_DISABLE_LINE_INFO": "0",  # reports name source lines
}
_NO_CUDA = "before first instrumented API call"
_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Outcome:
    """The files and the exit code that a process left; `status` is None if it was ended for taking too long.

    `unread`: first lines of reports of an unknown form, if the tool says that it has found something.
    """

    reports: list[SanitizerReport]
    notes: list[Note]
    status: int | None
    unread: list[str]
    output: str = ""

    @property
    def raised(self) -> Note | None:
        """The first exception that a kernel raised."""
        return next((note for note in self.notes if note.raised is not None), None)


class Sanitizer:
    """Runs cases under `tool`. Raises SanitizerUnavailable where that is not installed."""

    def __init__(self, tool: Tool, *, device: str) -> None:
        self.tool = tool
        self._device = device
        self._executable = find_executable()

    def run(self, declaration: Declaration, cases: Sequence[Case], *, limit_s: float | None = None) -> Outcome:
        """All `cases`, one after the other, in one process. Raises SanitizerUnavailable if it cannot work here."""
        limit_s = START_S + CASE_S * len(cases) if limit_s is None else limit_s
        with tempfile.TemporaryDirectory(prefix="attnfuzz-sanitizer-") as folder:
            log, notes, work_file, output = (Path(folder) / name for name in ("log", "notes", "work", "output"))
            work = Work(
                target=declaration.target,
                problem=declaration.problem,
                cases=tuple(msgspec.Raw(encode_case(case)) for case in cases),
                device=self._device,
                notes=str(notes),
            )
            write_file(work_file, msgspec.json.encode(work))
            target = safe_start.command("attnfuzz.sanitizer.target", str(work_file))
            command = command_line(self._executable, self.tool, log, target)
            status = _wait(command, output, _environment(self._device), limit_s)
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            return self._outcome(text, read_notes(notes), status, _tail(output))

    def _outcome(self, log: str, notes: list[Note], status: int | None, output: str) -> Outcome:
        reports = read_reports(log)
        unread = unread_headers(log) or [f"exit status {status}"] if status == ERROR_EXIT_CODE and not reports else []
        if _NO_CUDA in log:
            raise SanitizerUnavailable("compute-sanitizer saw no call of CUDA: its tools look at kernels on a GPU only")
        if not notes or (status == 0 and not is_complete(log)):
            said = " ".join((log.strip() or output).split()) or "nothing"
            raise SanitizerUnavailable(
                f"{self._executable} --tool {self.tool} could not run a case (exit status {status}); it said: "
                f"{said[-_TAIL_BYTES:]}"
            )
        return Outcome(reports, notes, status, unread, output)


def _wait(command: Sequence[str], output: Path, environment: Mapping[str, str], limit_s: float) -> int | None:
    """The exit code of `command`; None if it took longer. It and what it starts are gone then."""
    with os.fdopen(OwnFolder(output.parent).create(output.name), "wb") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment(device: str) -> dict[str, str]:
    return {**os.environ, **_ENVIRONMENT, "TRITON_INTERPRET": "1" if device == "cpu" else "0"}


def _tail(file: Path) -> str:
    return file.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
