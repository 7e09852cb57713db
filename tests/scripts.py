"""Scripts in processes of their own, forked from one that has torch loaded: its import takes longer than they do."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import os
import sys
import traceback
from pathlib import Path
from subprocess import CompletedProcess

import msgspec

from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.outcomes import Died, Reply
from attnfuzz.isolation.zygote_client import Zygote


class _Task(msgspec.Struct):
    code: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str


class _Told(msgspec.Struct):
    status: int
    output: str
    complaint: str


def run_script(code: str, *arguments: object, **variables: str) -> CompletedProcess[str]:
    """As `subprocess.run` of ``python -c code``, in the working directory and environment of this process.

    Of what is large only numpy and torch are loaded, so that Triton still reads ``variables`` when it is imported.
    """
    task = _Task(code, [*map(str, arguments)], os.environ | variables, str(Path.cwd()))
    with Executor(_zygote()) as executor:
        outcome = executor.call("run", msgspec.json.encode(task), timeout_s=600.0)
    command = ["python", "-c", code, *task.arguments]
    if isinstance(outcome, Died):
        return CompletedProcess(command, outcome.exit_status, "", outcome.output_tail)
    assert isinstance(outcome, Reply), outcome
    told = msgspec.json.decode(outcome.body, type=_Told)
    return CompletedProcess(command, told.status, told.output, told.complaint)


@functools.cache
def _zygote() -> Zygote:
    zygote = Zygote.start(service=f"{Path(__file__)}:Service", preload=("numpy", "torch"))
    atexit.register(zygote.close)
    return zygote


class Service:
    """In the executor."""

    def handle(self, method: str, payload: bytes) -> bytes:
        """Run one script, as the main module."""
        task = msgspec.json.decode(payload, type=_Task)
        os.environ.clear()
        os.environ.update(task.environment)
        os.chdir(task.folder)
        sys.argv = ["-c", *task.arguments]
        status, complaint, output = 0, "", io.StringIO()
        with contextlib.redirect_stdout(output):
            try:
                exec(compile(task.code, "<script>", "exec"), {"__name__": "__main__"})
            except SystemExit as end:
                status = int(end.code or 0)
            except Exception:  # noqa: BLE001 - whatever a script raises
                status, complaint = 1, traceback.format_exc()
        return msgspec.json.encode(_Told(status, output.getvalue(), complaint))
