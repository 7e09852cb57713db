"""attnfuzz.cli.output: what nobody reads any more does not decide how a command ends."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from attnfuzz.cli.output import while_anyone_reads

SCRIPT = """
import os, sys
from attnfuzz.cli.output import flush_output, while_anyone_reads
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
with while_anyone_reads():
    print("x" * 100_000)
print("more")
flush_output()
sys.exit(3)
"""


def test_the_exit_status_is_kept_when_the_reader_is_gone() -> None:
    """Python's own flush at the end fails, prints a complaint and turns the status into 120."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (3, "")


def test_other_errors_are_not_swallowed() -> None:
    """A file that cannot be read would look like success."""
    with pytest.raises(OSError, match="nothing there"), while_anyone_reads():
        raise OSError(errno.ENOENT, "nothing there")
