"""The commands bench kernels and bench tune."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import click
import msgspec
import pytest
import torch

from attnfuzz.bench.kernels.shapes import Report
from attnfuzz.bench.tuning_record import Tuned, python_source
from attnfuzz.cli.bench import command, option_values
from tests.common.in_process import attnfuzz

KERNELS = Path(__file__).parent / "timed_kernels.py"


def bench(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        return attnfuzz("bench", "kernels", *arguments, cwd=cwd)


def test_nothing_is_timed_without_a_gpu(tmp_path: Path) -> None:
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


def tune(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        return attnfuzz("bench", "tune", *arguments, cwd=cwd)


def test_nothing_is_tuned_without_a_gpu(tmp_path: Path) -> None:
    """Somebody would commit a tree that fits Triton's interpreter."""
    run = tune("paged_naive", cwd=tmp_path)
    assert run.returncode == 2
    assert "say nothing about a kernel" in run.stderr


def test_it_writes_a_module_and_json(tmp_path: Path) -> None:
    """What was measured would have to be copied from a terminal."""
    run = tune(
        f"{KERNELS}:right", "--device", "cpu", "--seconds", "0.001s", "--python", "tuned.py", "--json", "tuned.json",
        cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    source = (tmp_path / "tuned.py").read_text()
    assert source.strip() in run.stdout
    assert [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)] == ["choose_options"]
    tuned = msgspec.json.decode((tmp_path / "tuned.json").read_bytes(), type=Tuned)
    assert len(tuned.record.configurations) == 2
    assert python_source(tuned) == source


@pytest.mark.night
def test_options_that_go_together_are_tried_together(tmp_path: Path) -> None:
    """Most of the time would go into warps for blocks that are too small for them, or a typing error be taken."""
    kernel = Path(__file__).parent / "tuned_kernel.py"
    arguments: tuple[object, ...] = (kernel, "--device", "cpu", "--seconds", "0.001s")
    run = tune(
        *arguments, "--option", "tile/warps=16/4,64/8", "--option", "fused=false", "--json", "a.json", cwd=tmp_path
    )
    assert run.returncode == 0, run.stdout + run.stderr
    record = msgspec.json.decode((tmp_path / "a.json").read_bytes(), type=Tuned).record
    assert record.configurations == ({"tile": 16, "warps": 4}, {"tile": 64, "warps": 8})
    assert record.default == {"tile": 16, "warps": 1, "fused": False}
    for wrong in ("tile/warps=16", "tile=16,", "tile/tile=1/2", "a-b=1", "=1"):
        run = tune(*arguments, "--option", wrong, cwd=tmp_path)
        assert run.returncode == 2
        assert "must read NAME=VALUE" in run.stderr


@pytest.mark.night
def test_what_cannot_be_tuned_is_one_sentence(tmp_path: Path) -> None:
    """A wrong name would end in a traceback."""
    run = tune(KERNELS, "--device", "cpu", cwd=tmp_path)
    assert run.returncode == 2
    assert "names 12 kernels; name one" in run.stderr
    run = tune(f"{KERNELS}:drops_the_last_key", "--device", "cpu", cwd=tmp_path)
    assert run.returncode == 2
    assert "only one configuration" in run.stderr
