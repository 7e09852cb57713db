"""Everything here needs a GPU. Where there is none, one process finds out, and the whole folder is skipped.

Tests that run kernels leave CUDA to executors; only those marked so in their docstring use it in pytest's own process.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnfuzz.declaration import Declaration
from attnfuzz.judging.runner import Runner

FOLDER = Path(__file__).parent
BROKEN_KERNELS = FOLDER / "broken_kernels.py"
DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(FOLDER)]
    reason = why_no_gpu() if ours else None
    for item in ours if reason else ():
        item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU: {reason}"))


@functools.cache
def why_no_gpu() -> str | None:
    """Why kernels cannot run on a GPU here; None if they can. torch is asked in a process of its own."""
    if not any(Path(file).exists() for file in DRIVER_FILES):
        return "no driver is loaded"
    paths = os.pathsep.join(filter(None, (str(FOLDER.parents[1]), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "attnfuzz.probe", "device"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return None if json.loads(done.stdout)["cuda"] else "torch sees none"


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(device="cuda") as runner:
        yield runner


@pytest.fixture(scope="module")
def broken(runner: Runner) -> dict[str, Declaration]:
    """The kernels of ``broken_kernels.py`` by name."""
    return {declaration.name: declaration for declaration in runner.declarations([str(BROKEN_KERNELS)])}
