"""Interpreters other than the driver's that executors can run in, each with the packages beside it. Torch-free."""

import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from attnfuzz import safe_start
from attnfuzz.isolation.process import kill_group
from attnfuzz.untrusted_text import NAME_BYTES, only_printable, printable

OLDEST_PYTHON = "3.11"

_TIMEOUT_S = 60.0
"""For an interpreter to start and list what is installed; a file server in the next building may hold it."""
_MOST_BYTES = 8 << 20
_REMEDY = "name an interpreter, or the folder of a virtual environment, which has bin/python"
_UNKNOWN_OPTION = b"nknown option: -P"
"""Message of a Python that is older than 3.11, in which -P is new."""


class PythonError(ValueError):
    """Executors cannot run there; the message is one sentence with the remedy."""


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter, and the versions of what imports find there, by distribution; its own is that of ``python``."""

    path: Path
    versions: Mapping[str, str]


class _Answer(msgspec.Struct):
    missing: tuple[str, ...]
    versions: dict[str, str]


def examine_all(paths: Iterable[Path]) -> list[Python]:
    """As `examine`, for each of ``paths``; one that is named twice is compared with nothing, and refused."""
    found: dict[Path, Python] = {}
    for path in paths:
        python = examine(path)
        if python.path in found:
            raise PythonError(f"--python {str(path)!r} is named twice; name each environment once")
        found[python.path] = python
    return list(found.values())


def examine(path: Path, *, timeout_s: float = _TIMEOUT_S) -> Python:
    """Ask the interpreter ``path``, or that of the virtual environment in the folder ``path``, what is installed there.

    Raises PythonError where there is none, it is too old, or lacks what executors import.
    """
    interpreter = _interpreter(path)
    told = f"--python {str(path)!r}"
    status, said, complaint = _asked(interpreter, told, timeout_s)
    if _UNKNOWN_OPTION in complaint:
        raise PythonError(
            f"{told} is a Python older than {OLDEST_PYTHON}, which attnfuzz needs; make one with a newer Python"
        )
    try:
        answer = msgspec.json.decode(said, type=_Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        last = printable((complaint or said).decode(errors="replace").strip().rpartition("\n")[2], NAME_BYTES)
        how = f"it ended with status {status}" + (f" and said {last!r}" if last else "")
        raise PythonError(f"{told} does not answer as a Python does ({how}); {_REMEDY}") from None
    if answer.missing:
        *others, last = answer.missing
        lacks = f"{', '.join(others)} and {last}" if others else last
        install = f"{interpreter} -m pip install {' '.join(answer.missing)}"
        raise PythonError(f"{told} has no {lacks}, which executors import; install that there: {install}")
    versions = {printable(name, NAME_BYTES): printable(one, NAME_BYTES) for name, one in answer.versions.items()}
    return Python(interpreter, versions)


def _interpreter(path: Path) -> Path:
    """The file to run, by an absolute name. Links are not followed: that of a virtual environment is one."""
    interpreter = path.absolute()
    if only_printable(str(interpreter)) != str(interpreter):
        raise PythonError(f"--python {str(path)!r} has control characters in its name; rename the folder")
    if interpreter.is_dir():
        interpreter /= "bin/python"
        if not interpreter.exists():
            raise PythonError(f"--python {str(path)!r} is a folder without bin/python; {_REMEDY}")
    if not interpreter.exists():
        raise PythonError(f"--python {str(path)!r} does not exist; {_REMEDY}")
    return interpreter


def _asked(interpreter: Path, told: str, timeout_s: float) -> tuple[int, bytes, bytes]:
    """Exit status, output and the end of the complaints of the process that tells what is installed."""
    with tempfile.TemporaryFile() as complaints:
        try:
            process = subprocess.Popen(
                safe_start.command("attnfuzz.environment", python=interpreter),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=complaints,
                start_new_session=True,  # so that all it has started ends with it
            )
        except OSError as error:
            raise PythonError(f"{told} cannot be run ({error.strerror}); {_REMEDY}") from error
        with process:
            try:
                said = _read(process.stdout, until=time.monotonic() + timeout_s) if process.stdout else b""
            finally:
                kill_group(process.pid)
        if said is None:
            raise PythonError(f"{told} did not answer within {timeout_s:g} s; {_REMEDY}")
        end = complaints.seek(0, os.SEEK_END)
        complaints.seek(max(0, end - _MOST_BYTES))
        return process.returncode, said, complaints.read()


def _read(stream: IO[bytes], *, until: float) -> bytes | None:
    """All that comes, up to a limit; None if it goes on past ``until``."""
    said = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while len(said) < _MOST_BYTES:
            if not selector.select(max(0.0, until - time.monotonic())):
                return None
            part = os.read(stream.fileno(), 1 << 16)
            if not part:
                break
            said += part
    return bytes(said)
