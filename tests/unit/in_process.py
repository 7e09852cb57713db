"""The command line without a process of its own, which would take a second to import torch."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

from attnfuzz.cli import main


def attnfuzz(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What ``attnfuzz`` with these arguments prints in ``cwd``, and its exit status."""
    command = ["attnfuzz", *map(str, arguments)]
    with (
        pytest.MonkeyPatch.context() as patched,
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        patched.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as end:
            main()
    assert isinstance(end.value.code, int)
    return subprocess.CompletedProcess(command, end.value.code, out.getvalue(), err.getvalue())
