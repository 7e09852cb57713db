"""Cases in processes under a stand-in for compute-sanitizer: from its report to a finding, and to exit statuses."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from attnfuzz.cli import replay
from attnfuzz.cli.output import Refusal
from attnfuzz.corpus import FindingRecord, Regression, write_regression
from attnfuzz.declaration import Declaration, load_kernels
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.sanitizer.findings import failure_of, judge_sanitized
from attnfuzz.sanitizer.report import SanitizerReport
from attnfuzz.sanitizer.running import Note, Outcome, Sanitizer, SanitizerUnavailable, find_executable
from tests.common.sanitizer_stand_in import BEHAVES, OBJECTS_TO, install

KERNELS = Path(__file__).with_name("sanitized_kernels.py")
CASE = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(3,), scale=0.25)
GUILTY = '"seq_lens":[7]'
SEVEN = msgspec.structs.replace(CASE, seq_lens=(7,))


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On PATH, before a real one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(OBJECTS_TO, GUILTY)
    return install(folder)


def declared(name: str) -> Declaration:
    (kernel,) = load_kernels(f"{KERNELS}:{name}")
    return kernel.declaration


def test_the_executable_is_looked_for_where_it_is_installed(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA toolkit that is not on PATH would not be found, or one that is missing end in a traceback."""
    assert find_executable() == stand_in
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_executable() == stand_in
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setattr("attnfuzz.sanitizer.running._CUDA", tmp_path / "cuda")
    where = r"neither on PATH nor at /nowhere/bin/compute-sanitizer, .*CUDA_HOME"
    with pytest.raises(SanitizerUnavailable, match=where):
        find_executable()


def test_a_report_becomes_a_finding_in_words() -> None:
    """An engineer would be shown addresses and not which tensor they are of."""
    failure = judge_sanitized(Sanitizer("memcheck", device="cpu"), declared("right"), SEVEN)
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("sanitizer", "memcheck: Invalid __global__ read of size 2 bytes")
    assert re.fullmatch(
        r"Invalid __global__ read of size 2 bytes in sum_keys_kernel \(decode.py:12\) by thread \(3,0,0\) of block "
        r"\(1,2,0\) at 0x[0-9a-f]+, which is out of bounds: 1 byte past the end of k",
        failure.message,
    )
    assert not any("Host Frame" in line for line in failure.details)


@pytest.mark.night
def test_a_kernel_that_raises_is_told() -> None:
    """It would pass, or the tool be said to object."""
    raised = judge_sanitized(Sanitizer("memcheck", device="cpu"), declared("raises"), CASE)
    assert raised is not None
    assert (raised.oracle, raised.message) == ("exception", "the kernel raised ValueError: not today")


def test_other_ends_of_a_process_are_told() -> None:
    """A kernel that ends its process or never comes back would pass, or be blamed by the tool."""
    begun = [Note(case=0)]
    ended = failure_of(Outcome([], begun, 3, [], output="so long"), "memcheck")
    assert ended is not None
    assert (ended.oracle, ended.kind, ended.details) == ("crash", "exit 3", ("so long",))
    hung = failure_of(Outcome([], begun, None, []), "memcheck")
    assert hung is not None
    assert hung.message == "the kernel did not come back under memcheck"


def test_what_takes_too_long_is_ended_with_all_that_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search would stand still, or leave processes that hold the GPU."""
    monkeypatch.setenv(BEHAVES, "idle and stuck")
    outcome = Sanitizer("memcheck", device="cpu").run(declared("right"), [CASE], limit_s=2.0)
    assert outcome.status is None


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("broken", "could not run a case .exit status 1.; it said: this tool does not go with this driver"),
        ("idle, no CUDA", "saw no call of CUDA: its tools look at kernels on a GPU only"),
        ("idle, unfinished", "could not run a case .exit status 0."),
    ],
)
def test_a_tool_that_does_not_work_is_no_pass(how: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels would pass where nothing looks at them."""
    monkeypatch.setenv(BEHAVES, how)
    with pytest.raises(SanitizerUnavailable, match=said):
        judge_sanitized(Sanitizer("memcheck", device="cpu"), declared("right"), CASE)


def test_a_report_that_cannot_be_read_is_a_finding_all_the_same() -> None:
    """The tool says that it has found something."""
    failure = failure_of(Outcome([], [Note(case=0, done=True)], 86, ["Cluster barrier left early"]), "synccheck")
    assert failure is not None
    assert failure.message == "synccheck objects: Cluster barrier left early"


def test_more_reports_are_counted() -> None:
    """The rest would be lost without a word."""
    reports = [SanitizerReport("Invalid __global__ read of size 2 bytes", ("Invalid",), address=5)] * 3
    failure = failure_of(Outcome(reports, [Note(case=0)], 86, []), "memcheck")
    assert failure is not None
    assert "and 2 more reports of this run" in failure.details
    assert failure.message == "Invalid __global__ read of size 2 bytes at 0x5"


def test_replay_under_a_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CI job could not tell a case that the tool objects to from one that it does not."""
    monkeypatch.setenv(BEHAVES, "idle")
    finding = FindingRecord(oracle="sanitizer", kind="memcheck: Invalid __global__ read of size 2 bytes", message="x")
    target = f"{KERNELS}:right"
    for case in (CASE, SEVEN):
        write_regression(Regression(problem="dense_decode", kernel=target, case=case, finding=finding), tmp_path / "r")
    arguments = [str(tmp_path / "r"), "--kernel", target, "--device", "cpu"]
    status, output = ran(replay.command, *arguments, "--sanitizer", "memcheck")
    assert status == 1, output
    assert "sanitizer/memcheck: Invalid __global__ read of size 2 bytes" in output
    assert "2 saved cases, 2 runs: 1 failed" in output
    status, output = ran(replay.command, *arguments)
    assert status == 0, output
    assert "2 of these were found under compute-sanitizer" in output
    assert "replay them with --sanitizer memcheck" in output
    assert "now passing" not in output


def test_a_tool_that_is_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing tool would end in a traceback."""
    finding = FindingRecord(oracle="accuracy", message="x")
    target = f"{KERNELS}:right"
    write_regression(Regression(problem="dense_decode", kernel=target, case=CASE, finding=finding), tmp_path / "r")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("attnfuzz.sanitizer.running._CUDA", tmp_path / "cuda")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(Refusal, match="--sanitizer: compute-sanitizer is not installed"):
        ran(replay.command, str(tmp_path / "r"), "--kernel", target, "--device", "cpu", "--sanitizer", "memcheck")


def ran(command: click.Command, *arguments: str) -> tuple[int, str]:
    """The exit status that a command returns, and what it prints, in one line."""
    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value.status, " ".join(result.output.split())
