"""attnfuzz.cli.outcome: one place decides what a command's exit status is, from what was judged."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import attnfuzz.cli
from attnfuzz.cli import command_called
from attnfuzz.cli.outcome import SHOWN, Outcome, outcome_of
from attnfuzz.corpus import Environment, FindingRecord, Regression, write_regression
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.report.terminal import make_console, print_result
from tests.common.in_process import attnfuzz as run
from tests.common.report_results import a_result

CANNOT_RUN = """
import torch
import triton
import triton.language as tl

import attnfuzz


@triton.jit
def assembly(p, TILE: tl.constexpr):
    o = tl.arange(0, TILE)
    tl.store(p + o, tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(p + o)], tl.float32, True, 1))


@attnfuzz.kernel("dense_decode")
def mine(inputs):
    assembly[(1,)](torch.empty(16, device=inputs.q.device), TILE=16)
"""


def commands() -> Iterator[tuple[str, click.Command]]:
    group = attnfuzz.cli._attnfuzz
    context = click.Context(group)
    for name in group.list_commands(context):
        command = command_called(name)
        if isinstance(command, click.Group):
            yield from ((f"{name} {one}", sub) for one, sub in command.commands.items())
        else:
            yield name, command


def test_every_command_says_what_it_judged_and_none_what_its_status_is() -> None:
    """Each would decide for itself again what nothing judged means, and most would say success."""
    checked = 0
    for name, command in commands():
        assert command.callback is not None
        function = inspect.unwrap(command.callback)
        assert function.__annotations__["return"] == "Outcome", name
        module = inspect.getmodule(function)
        assert module is not None
        assert vars(module)["Outcome"] is Outcome, name
        checked += 1
    assert checked >= 15


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome(judged=7), 0),
        (SHOWN, 0),
        (Outcome(judged=0), 2),
        (Outcome(judged=7, missed=True), 2),
        (Outcome(judged=7, missed=True, failed=True), 1),
        (Outcome(judged=7, failed=True, signal=15), 143),
        (Outcome.of_all([SHOWN, Outcome(judged=7)]), 0),
        (Outcome.of_all([Outcome(judged=0), Outcome(judged=7)]), 2),
        (Outcome.of_all([Outcome(judged=0), Outcome(judged=7, failed=True)]), 1),
        (Outcome.of_all([Outcome(judged=3, failed=True), Outcome(judged=0, signal=2)]), 130),
    ],
)
def test_what_was_judged_decides(outcome: Outcome, status: int) -> None:
    """A CI job would be green where nothing was judged, or red where a machine's share of the work was empty."""
    assert outcome.status == status


def test_an_oracle_that_never_applies_is_named_and_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    """A search by one oracle that says nothing of the kernel would find nothing in any kernel, however wrong."""
    result = a_result()
    for kernel in result.statistics.kernels.values():
        kernel.cases = 50
    assert outcome_of(result).status == 0
    result.statistics.oracles = ("split_count", "accuracy")
    assert outcome_of(result).status == 2
    print_result(make_console(), result)
    said = capsys.readouterr().out
    assert "split_count applies to none of" in said
    assert "accuracy applies" not in said
    first, *others = result.statistics.kernels.values()
    first.related["split_count"] = 3
    assert (result.idle_oracles, outcome_of(result).status) == ((), 0)
    result.statistics.oracles = ("split_count",)
    assert outcome_of(result).status == 2
    print_result(make_console(), result)
    said = capsys.readouterr().out
    assert "was judged by split_count, which does not apply there" in said
    for other in others:
        other.related["split_count"] = 1
    assert outcome_of(result).status == 0


def test_what_could_be_tried_on_no_case_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Offsets that wrap behind a wrapper which copies the cache would be taken for tested."""
    result = a_result()
    first = next(iter(result.statistics.kernels.values()))
    first.untried["page_relocation"] = 3
    said = []
    for cases in (0, 2):
        first.related["page_relocation"] = cases
        print_result(make_console(), result)
        said.append("page_relocation could make none of its runs in 3 cases" in capsys.readouterr().out)
    assert said == [True, False]


def test_a_kernel_that_was_never_reached_is_no_success() -> None:
    """A CI job would pass on a kernel that nobody has looked at."""
    result = a_result()
    for kernel in result.statistics.kernels.values():
        kernel.cases = 50
    assert outcome_of(result).status == 0
    kernel.cases = 0
    assert outcome_of(result).status == 2


def a_case(folder: Path) -> Path:
    """Of the kernel that Triton's interpreter cannot run."""
    (folder / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (folder / "mine.py").write_text(CANNOT_RUN)
    case = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(3,), scale=0.25)
    regression = Regression(
        problem="dense_decode",
        kernel="mine.py:mine",
        case=case,
        finding=FindingRecord(oracle="accuracy", kind="out:value", message="wrong"),
        environment=Environment(device="", versions={}, date=""),
    )
    return write_regression(regression, folder / "regressions")


@pytest.mark.parametrize(
    "command",
    [
        ("replay", "regressions"),
        ("explain", "CASE"),
        ("conformance", "mine.py"),
        ("declare", "mine.py", "--budget", "2s"),
        ("verify", "mine.py", "--budget", "2s", "--workers", "1"),
        ("explore", "mine.py", "--budget", "2s", "--workers", "1", "--quiet"),
    ],
    ids=lambda command: command[0],
)
@pytest.mark.by_day("replay", "explain")
def test_a_kernel_that_cannot_run_here_is_not_judged_by_any_command(command: tuple[str, ...], tmp_path: Path) -> None:
    """A CI job without a GPU would be green, or say that a case passes, of a kernel that never ran."""
    case = a_case(tmp_path)
    ran = run(*(str(case) if word == "CASE" else word for word in command), "--device", "cpu", cwd=tmp_path)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "passes" not in ran.stdout
    assert "inline_asm" in ran.stdout + ran.stderr or command[0] == "conformance"


def test_a_shard_without_cases_says_so_and_is_no_failure(tmp_path: Path) -> None:
    """A job matrix with more machines than cases would be red, or nobody would learn why one of them did nothing."""
    a_case(tmp_path)
    ran = run("replay", "--shard", "2/2", "--json", "told.json", "--device", "cpu", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "there are more shards than saved cases: nothing is left for this one to run" in ran.stdout
    assert json.loads((tmp_path / "told.json").read_text())["results"] == []
