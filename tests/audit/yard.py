"""Where inputs are tried: a folder with files that are nobody's business, and code that tells if it is run."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from tests.faults.families import Family

ATTNFUZZ = os.fspath(Path(sys.executable).with_name("attnfuzz"))
TRACEBACK = b"Traceback (most recent call last)"

Kind = Literal["traceback", "hang", "foreign", "code", "other"]
Must = Literal["refuse", "work", "either"]

_MOST_OUTPUT_BYTES = 16 << 20
_MOST_MEMORY_BYTES = 3 << 30
"""Of one process: what is imported, what a case may take, and room for what comes and goes."""
_SENTENCES = 3
"""Lines on the terminal that a refusal may take: a name may have line breaks in it."""
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_PLANTED = """\
import os, pathlib
(pathlib.Path({ran!r}) / (__name__ + "-" + str(os.getpid()))).touch()
try:
    import attnfuzz
    from attnfuzz.kernels import eager
    @attnfuzz.kernel("dense_decode")
    def k(inputs):
        return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)
except ImportError:
    pass
"""


class Fault(msgspec.Struct, frozen=True):
    """Something that must not happen."""

    kind: Kind
    text: str


class Seen(msgspec.Struct):
    """What came of one or several inputs."""

    refused: int = 0
    accepted: int = 0
    faults: list[Fault] = []

    def add(self, other: Seen) -> None:
        """Count ``other`` as well."""
        self.refused += other.refused
        self.accepted += other.accepted
        self.faults += other.faults


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended; ``status`` is None if it had to be killed."""

    status: int | None
    output: bytes
    output_bytes: int
    seconds: float
    cpu_s: float
    peak_bytes: int
    left: int


class Yard:
    """A temporary folder: ``foreign`` must stay as it is, code in it must not run, ``room`` is new for each input."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.foreign = self.folder / "foreign"
        self.room = self.folder / "room"
        self.project = self.room / "project"
        self.family = Family()
        self._ran = self.folder / "ran"
        self._before = self._plant()

    def plant(self, path: Path) -> Path:
        """Write a module at ``path`` whose import is noticed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_PLANTED.format(ran=os.fspath(self._ran)))
        return path

    def clear(self) -> None:
        """Make the room anew: an empty project with a pyproject.toml, and a home and temporary folder beside it."""
        shutil.rmtree(self.room, ignore_errors=True)
        for folder in (self.project, self.room / "tmp", self.room / "home"):
            folder.mkdir(parents=True, exist_ok=True)
        (self.project / "pyproject.toml").write_text("[tool.attnfuzz]\n")
        (self.folder / "browser").write_text(f"#!/bin/sh\ntouch {self._ran}/browser\n")
        (self.folder / "browser").chmod(0o755)

    def look(self) -> list[Fault]:
        """What has been touched or run since the last time; all is put back."""
        faults = [Fault("code", f"ran {path.name.partition('-')[0]}") for path in self._ran.iterdir()][:1]
        now = _snapshot(self.foreign)
        if now != self._before:
            names = [name for name in {**self._before, **now} if self._before.get(name) != now.get(name)]
            faults.append(Fault("foreign", f"touched {', '.join(sorted(names)[:3])}"))
        if faults:
            self._before = self._plant()
        return faults

    def environment(self) -> dict[str, str]:
        """What commands are run with."""
        home, temporary = os.fspath(self.room / "home"), os.fspath(self.room / "tmp")
        return {
            **self.family.environment(),
            "HOME": home,
            "TMPDIR": temporary,
            "TRITON_CACHE_DIR": os.fspath(self.folder / "triton"),
            "BROWSER": os.fspath(self.folder / "browser"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def command(
        self,
        *arguments: str | bytes | os.PathLike[str],
        limit_s: float = 180.0,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        prepare: Callable[[], None] | None = None,
        others_end_within_s: float = 10.0,
    ) -> Done:
        """Run ``attnfuzz`` in the project and wait for the end of it and of all that it started."""
        log = self.folder / "output"
        started = time.monotonic()
        size_of_this = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*prefix, ATTNFUZZ, *arguments],
                cwd=cwd or self.project,
                env={**self.environment(), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare,
            )
            status, usage = _wait(process, started + limit_s)
        left = self.family.left_after(0.0 if status is None else others_end_within_s)
        for member in left:
            member.kill()
        if status is None:
            process.wait()
        with log.open("rb") as file:
            output = file.read(_MOST_OUTPUT_BYTES)
        return Done(
            status=status,
            output=output,
            output_bytes=log.stat().st_size,
            seconds=time.monotonic() - started,
            cpu_s=usage.ru_utime + usage.ru_stime if usage else 0.0,
            # The peak of a process begins with that of the one which starts it: until exec(2) they share their memory.
            peak_bytes=usage.ru_maxrss * 1024 if usage and usage.ru_maxrss > size_of_this else 0,
            left=len(left) if status is not None else 0,
        )

    def faults_in_files(self) -> list[Fault]:
        """Tracebacks that were written into a file instead of to the terminal."""
        for path in self.room.rglob("*"):
            if stat.S_ISREG(path.lstat().st_mode) and path.lstat().st_size < _MOST_OUTPUT_BYTES:
                data = path.read_bytes()
                if data.startswith(TRACEBACK) or b"\n" + TRACEBACK in data:
                    return [Fault("traceback", f"in the file {path.name}: {_raised(data)}")]
        return []

    def _plant(self) -> dict[str, tuple[object, ...]]:
        for folder in (self.foreign, self._ran):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self.plant(self.foreign / "planted.py")
        self.plant(self.foreign / "package" / "__init__.py")
        (self.foreign / "notes.txt").write_text("precious\n")
        (self.foreign / "precious.json").write_text('{"format": "attnfuzz.regression/1"}\n')
        return _snapshot(self.foreign)


def faults_of(
    done: Done,
    *,
    must: Must = "either",
    cpu_s: float = 60.0,
    statuses: Sequence[int] = (0, 1, 2),
    speaks: bool = True,
) -> Seen:
    """What is to be said of a command that ended so; ``speaks`` unless nothing could be heard of it."""
    faults = []
    if done.status is None or done.cpu_s > cpu_s:
        faults.append(Fault("hang", f"took {done.seconds:.0f} s, {done.cpu_s:.0f} s of them computing"))
    if TRACEBACK in done.output:
        faults.append(Fault("traceback", _raised(done.output)))
    elif done.status is not None and done.status not in statuses:
        faults.append(Fault("other", f"exit status {done.status}: {_last_line(done.output)}"))
    elif done.status == 2 and done.output.strip().count(b"\n") >= _SENTENCES:
        faults.append(Fault("other", f"refused in {done.output.count(10)} lines: {_last_line(done.output)}"))
    elif done.status == 2 and speaks and not done.output.strip():
        faults.append(Fault("other", "refused without a word"))
    elif must != "either" and done.status is not None and (done.status == 2) is (must == "work"):
        faults.append(Fault("other", f"must {must}, exit status {done.status}: {_last_line(done.output)}"))
    if found := _CONTROL.search(done.output):
        faults.append(Fault("other", f"control character {found[0]!r} on the terminal"))
    if done.output_bytes > _MOST_OUTPUT_BYTES:
        faults.append(Fault("other", f"{done.output_bytes >> 20} MiB on the terminal"))
    if done.peak_bytes > _MOST_MEMORY_BYTES:
        faults.append(Fault("other", f"took {done.peak_bytes / 2**30:.1f} GiB"))
    if done.left:
        faults.append(Fault("other", f"{done.left} processes left"))
    is_refused = done.status == 2
    return Seen(refused=int(is_refused), accepted=int(not is_refused), faults=faults)


def _wait(process: subprocess.Popen[bytes], deadline: float) -> tuple[int | None, resource.struct_rusage | None]:
    pause_s = 0.005
    while time.monotonic() < deadline:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage
        time.sleep(pause_s)
        pause_s = min(0.1, 1.2 * pause_s)
    return None, None


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return repr(lines[-1][:200]) if lines else "nothing said"


def _raised(output: bytes) -> str:
    """The first line behind a traceback's frames."""
    lines = output.decode(errors="replace").partition(TRACEBACK.decode())[2].splitlines()[1:]
    return repr(next((line for line in lines if line[:1] not in ("", " ")), "")[:200])


def _snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """By name: what would tell a change, however it was made."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        name = os.fspath(path.relative_to(folder))
        found[name] = (about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_mode, about.st_ino, digest)
    return found
