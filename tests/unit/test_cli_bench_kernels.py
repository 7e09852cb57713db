"""``attnfuzz bench kernels`` as it is typed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import click
import msgspec
import pytest
import torch

from attnfuzz.bench.kernels.shapes import Report
from attnfuzz.cli.bench import command, option_values
from tests.unit.in_process import attnfuzz

KERNELS = Path(__file__).parent / "timed_kernels.py"


def bench(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        return attnfuzz("bench", "kernels", *arguments, cwd=cwd)


def test_without_a_gpu_it_refuses(tmp_path: Path) -> None:
    """Somebody would take the interpreter's times for those of a kernel."""
    run = bench("paged_naive", cwd=tmp_path)
    assert run.returncode == 2
    assert "say nothing about a kernel" in run.stderr
    assert "--device cpu" in run.stderr


def test_the_smoke_suite_writes_everything(tmp_path: Path) -> None:
    """Nobody could try the command, or a kernel file for it, on a machine without a GPU."""
    run = bench(
        f"{KERNELS}:right", f"{KERNELS}:drops_the_last_key", "--device", "cpu", "--beside", "torch:sdpa",
        "--option", "num_splits=1,2", "--seconds", "0.001s", "--json", "times.json",
        cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 1, run.stdout + run.stderr  # for one that is wrong
    assert "the times say nothing" in run.stdout
    assert "WRONG" in run.stdout
    assert f"torch:sdpa{' ' * 22}torch {torch.__version__}" in run.stdout
    report = msgspec.json.decode((tmp_path / "times.json").read_bytes(), type=Report)
    assert {one.contender.rpartition(":")[2]: one.status for one in report.chosen("smoke")} == {
        "right": "ok", "drops_the_last_key": "wrong", "sdpa": "ok",
    }  # fmt: skip


@pytest.mark.night
def test_an_option_that_no_kernel_has_is_refused(tmp_path: Path) -> None:
    """A misspelt option would be ignored, and a kernel timed with another one."""
    run = bench(f"{KERNELS}:right", "--device", "cpu", "--beside", "none", "--option", "splits=2", cwd=tmp_path)
    assert run.returncode == 2
    assert "they have num_splits" in run.stderr


def test_values_of_options_are_what_python_would_make_of_them() -> None:
    """A kernel would get the word "8" for a number of splits."""
    kernels = command.commands["kernels"]
    context = click.Context(kernels)
    parameter = next(one for one in kernels.params if one.name == "options")
    found = option_values(context, parameter, ("num_splits=1, 8", "partials=input", "fast=true", "share=0.5"))
    assert found == {"num_splits": (1, 8), "partials": ("input",), "fast": (True,), "share": (0.5,)}
    for wrong in ("num_splits", "=3", "a-b=3", "a=1,,2"):
        with pytest.raises(click.BadParameter, match="NAME=VALUE"):
            option_values(context, parameter, (wrong,))
