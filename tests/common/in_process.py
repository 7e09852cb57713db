"""The command line without a process of its own, which would take a second to import torch, and without waiting."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnfuzz.campaign.coordinator import Coordinator
from attnfuzz.campaign.result import StopReason
from attnfuzz.campaign.stopping import Interrupts
from attnfuzz.cli import main


def attnfuzz(*arguments: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What ``attnfuzz`` with these arguments and environment variables prints in ``cwd``, and its exit status."""
    command = ["attnfuzz", *map(str, arguments)]
    with (
        pytest.MonkeyPatch.context() as patched,
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(_stream()) as out,
        contextlib.redirect_stderr(_stream()) as err,
    ):
        for name, value in variables.items():
            patched.setenv(name, value)
        patched.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as end:
            main()
    assert isinstance(end.value.code, int)
    return subprocess.CompletedProcess(command, end.value.code, _written(out), _written(err))


@contextlib.contextmanager
def ending_after(cases: int, *, kernels: int | None = None) -> Iterator[None]:
    """Campaigns end as if their budget were spent once each kernel has been judged in ``cases``, however long it takes.

    Or so many ``kernels``, where others cannot be. A budget in seconds is waited for on a fast machine, and is too
    short on a slow one.
    """
    asked = Coordinator._reason_to_stop

    def reason_to_stop(coordinator: Coordinator, interrupts: Interrupts) -> StopReason | None:
        statistics = coordinator._statistics
        asked_for = len(statistics.kernels) if kernels is None else kernels
        if sum(kernel.cases >= cases for kernel in statistics.kernels.values()) >= asked_for:
            statistics.deadline = min(statistics.deadline, time.monotonic())
        return asked(coordinator, interrupts)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Coordinator, "_reason_to_stop", reason_to_stop)
        yield


def _stream() -> io.TextIOWrapper:
    """For text and for bytes, as those of a process."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape", write_through=True)


def _written(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()
