"""The compute-sanitizer executable: where it is looked for, and how it is told to run a command."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

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
