"""What a person sees of a campaign in its first minute: measured of whole commands, with nothing compiled and after."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from attnfuzz import safe_start

__all__ = ["FirstMinute", "MinuteSummary", "measure_first_minutes"]

_MOST_STATUS = 2
"""Exit statuses of a campaign that has run: nothing found, something found, something not judged."""


class _Finding(msgspec.Struct):
    cause: str
    first_seen_s: float
    shrunk_s: float | None
    in_contract: bool


class _Kernel(msgspec.Struct):
    target: str
    findings: tuple[_Finding, ...]
    cases: int = 0


class MinuteSummary(msgspec.Struct):
    """What is read of a campaign's ``--json``."""

    cases: int
    device: str
    kernels: tuple[_Kernel, ...]
    first_case_s: float | None = None
    first_minute: int = 0
    compiling: float = 0.0


@dataclass(frozen=True, slots=True)
class FirstMinute:
    """Seconds since one command began: until its first line, until its end, and what its own summary says.

    ``warm``: whether the campaign before it had compiled the same kernels.
    """

    warm: bool
    first_line_s: float | None
    wall_s: float
    summary: MinuteSummary

    @property
    def found(self) -> Iterator[tuple[float, float | None, str, str]]:
        """When each finding that counts was first seen and when it was shrunk, its kernel and its cause; in order."""
        findings = (
            (one.first_seen_s, one.shrunk_s, kernel.target, one.cause)
            for kernel in self.summary.kernels
            for one in kernel.findings
            if one.in_contract
        )
        return iter(sorted(findings, key=lambda found: (found[0], found[2:])))


def measure_first_minutes(
    arguments: Sequence[str], *, command: Sequence[str] = (), runs: int = 2
) -> Iterator[FirstMinute]:
    """``attnfuzz explore ARGUMENTS`` so many times in an empty folder, the first with no kernel compiled.

    ``command`` starts another attnfuzz, to compare with. Raises RuntimeError with what a command said that has not run.
    """
    with tempfile.TemporaryDirectory() as compiled:
        environment = {**os.environ, "TRITON_CACHE_DIR": f"{compiled}/triton"}
        for number in range(runs):
            with tempfile.TemporaryDirectory() as scratch:
                yield _measured(arguments, command, environment, Path(scratch), warm=number > 0)


def _measured(
    arguments: Sequence[str], command: Sequence[str], environment: dict[str, str], scratch: Path, *, warm: bool
) -> FirstMinute:
    written = scratch / "summary.json"
    own = command or safe_start.command("attnfuzz")
    asked = [*own, "explore", *arguments, "--json", os.fspath(written), "--save-dir", os.fspath(scratch / "found")]
    started = time.monotonic()
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=complaints, env=environment, cwd=Path.cwd()) as process,
    ):
        stdout = process.stdout
        if stdout is None:  # Popen's type allows it; with PIPE it cannot be
            raise RuntimeError("the command was started without a pipe for what it prints")
        first = os.read(stdout.fileno(), 1)
        first_line_s = time.monotonic() - started if first else None
        said = stdout.read()
        status = process.wait()
        wall_s = time.monotonic() - started
        complaints.seek(0)
        if status not in range(_MOST_STATUS + 1) or not written.exists():
            told = (first + said + complaints.read()).decode(errors="replace").strip()
            raise RuntimeError(f"{' '.join(asked)} ended with status {status}: {told}")
    return FirstMinute(warm, first_line_s, wall_s, msgspec.json.decode(written.read_bytes(), type=MinuteSummary))
