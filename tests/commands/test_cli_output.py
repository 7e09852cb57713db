"""attnfuzz.cli.output: what nobody reads any more does not decide how a command ends."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attnfuzz.cli.output import while_anyone_reads
from attnfuzz.corpus import FindingRecord, Regression, write_regression
from attnfuzz.problems.cases import DenseDecodeCase

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


def shell(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """What becomes of ``script``, in which ``$attnfuzz`` is the command and ``$case`` a saved case."""
    record = FindingRecord(oracle="accuracy", message="wrong")
    case = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(3,), scale=0.25)
    saved = Regression(problem="dense_decode", kernel="dense_eager", case=case, finding=record)
    names = {"attnfuzz": f"{sys.executable} -m attnfuzz", "case": str(write_regression(saved, tmp_path / "saved"))}
    return subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path, env={**os.environ, **names}, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        "show $case >&-",
        "show $case >&- <&-",
        "show $case >/dev/full",
        "explore --help >&-",
        "replay $case --kernel dense_eager >&- <&-",
    ],
)
def test_output_that_cannot_be_written_is_one_sentence(command: str, tmp_path: Path) -> None:
    """Status 0 would say that somebody has it, 1 that a case fails; a socket would take its place and be printed to."""
    run = shell(f"$attnfuzz {command}", tmp_path)
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith("Error: the output cannot be written: ")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("streams", [">/dev/full", ">&- 2>&- <&-"])
@pytest.mark.night
def test_a_search_that_nobody_can_read_ends_with_its_own_status(streams: str, tmp_path: Path) -> None:
    """What it did is in its files, and its status says whether all was judged."""
    run = shell(f"$attnfuzz explore dense_eager --budget 1s --workers 1 --json a.json {streams}", tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads((tmp_path / "a.json").read_text())["cases"] > 0


def test_without_stderr_a_refusal_is_still_a_refusal(tmp_path: Path) -> None:
    """The interpreter's own complaint about its last flush would make it status 1, a finding."""
    run = shell("$attnfuzz show missing.json 2>&-", tmp_path)
    assert (run.returncode, run.stdout) == (2, "")


@pytest.mark.parametrize("command", ["--help", "show $case"])
def test_a_reader_that_has_gone_is_nobody_to_complain_to(command: str, tmp_path: Path) -> None:
    """`attnfuzz show FILE | head -1` would end in a traceback, or with the status that means findings."""
    run = shell(f"$attnfuzz {command} | head -0; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert run.returncode in (0, 128 + signal.SIGPIPE)  # where the pipe still took it all, 0
    assert (run.stdout, run.stderr) == ("", "")


def test_other_errors_are_not_swallowed() -> None:
    """A file that cannot be read would look like success."""
    with pytest.raises(OSError, match="nothing there"), while_anyone_reads():
        raise OSError(errno.ENOENT, "nothing there")
