"""Whether this machine can run attnfuzz, and what to do where it cannot: ``attnfuzz doctor``.

Torch, triton and CUDA are only touched in processes of their own.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attnfuzz import safe_start
from attnfuzz.environment import (
    OLDEST,
    TRITON_REMEDY,
    folder_of_compiled,
    installed,
    interpreter_problem,
    version_numbers,
)
from attnfuzz.internal_errors import in_one_sentence
from attnfuzz.isolation import memory_faults as fault_record
from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.zygote_client import Zygote
from attnfuzz.judging.runner import SERVICE
from attnfuzz.memory.address_space import why_unavailable
from attnfuzz.own_files import OwnFolder

OLDEST_PYTHON = (3, 11)
_PROBE_TIMEOUT_S = 120.0
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report. ``remedy`` says what to do about a problem or a note."""

    name: str
    status: Literal["ok", "note", "problem"]
    text: str
    remedy: str = ""


def examine() -> Iterator[Line]:
    """Every line of the report, as soon as it is known."""
    yield _python()
    packages = [_package(name, oldest) for name, oldest in OLDEST.items()]
    yield from packages
    if any(line.name == "torch" and line.status == "problem" for line in packages):
        return
    yield _device()
    yield _interpreter()
    yield _cache()
    yield _addresses()
    yield _faults()
    yield _restart()


def _python() -> Line:
    text = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info >= OLDEST_PYTHON:
        return Line("python", "ok", text)
    return Line("python", "problem", text, "install Python 3.11 or newer")


def _package(name: str, oldest: str) -> Line:
    found = installed(name)
    remedy = TRITON_REMEDY if name == "triton" else f'pip install "{name}>={oldest}"'
    if found is None:
        return Line(name, "problem", "not installed", remedy)
    if version_numbers(found) < version_numbers(oldest):
        return Line(name, "problem", f"{found} is older than {oldest}", remedy)
    return Line(name, "ok", found)


def _device() -> Line:
    try:
        found = _probe("device")
    except ProbeError as error:
        return Line("device", "problem", str(error), "reinstall torch for this machine")
    if found["cuda"]:
        return Line("device", "ok", f"{found['count']} x {found['name']}")
    if _NVIDIA_DRIVER.exists():
        return Line(
            "device",
            "note",
            f"an NVIDIA driver is loaded, but torch {installed('torch')} sees no GPU; kernels run on the CPU",
            "install a torch built for CUDA, or check CUDA_VISIBLE_DEVICES",
        )
    return Line("device", "ok", "no GPU; kernels run on the CPU in Triton's interpreter")


def _interpreter() -> Line:
    problem = interpreter_problem()
    if problem is not None:
        text, _, remedy = problem.partition("; ")
        return Line("interpreter", "problem", text, remedy)
    try:
        works = _probe("interpreter", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")["works"]
    except ProbeError as error:
        return Line("interpreter", "problem", str(error), "install the versions in constraints.txt")
    if works:
        return Line("interpreter", "ok", "ran a small kernel on the CPU")
    return Line("interpreter", "problem", "a small kernel gave a wrong sum", "install the versions in constraints.txt")


def _cache() -> Line:
    folder = folder_of_compiled()
    try:
        OwnFolder(folder).make()
        with tempfile.TemporaryFile(dir=folder):
            return Line("kernel cache", "ok", str(folder))
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror})"
        return Line("kernel cache", "problem", text, "set TRITON_CACHE_DIR to a folder that can")


def _addresses() -> Line:
    """Without them, page_relocation has nothing to say."""
    reason = why_unavailable()
    if reason is None:
        return Line("addresses", "ok", "enough for cases at offsets past 2^32 elements, which take no memory")
    text, _, remedy = reason.partition("; ")
    return Line("addresses", "note", f"{text}: the oracle page_relocation judges no case", remedy)


def _faults() -> Line:
    """Without knowing of them, guard_page would end processes for nothing."""
    reason = fault_record.why_unavailable()
    if reason is None:
        return Line("faults", "ok", "accesses outside of tensors are told by tensor and distance")
    return Line("faults", "note", f"{reason}: the oracle guard_page judges no case", "run it on such a machine")


def _restart() -> Line:
    """Crashes and hangs cost one restart of an executor each."""
    try:
        with Zygote.start("cpu", service=SERVICE) as zygote:
            executor = Executor(zygote)
            started = time.perf_counter()
            executor.restart()
            elapsed_ms = 1000 * (time.perf_counter() - started)
            executor.close()
    except RuntimeError as error:
        remedy = "see the output above; then run attnfuzz doctor again"
        return Line("executor", "problem", in_one_sentence(str(error)), remedy)
    return Line("executor", "ok", f"restarts in {elapsed_ms:.0f} ms")


class ProbeError(RuntimeError):
    """The probing process failed; the message is the last line that it printed."""


def _probe(what: str, **environment: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            safe_start.command("attnfuzz.probe", what),
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {_PROBE_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise ProbeError(last)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
