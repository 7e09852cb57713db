"""``attnfuzz bench tune`` as it is typed."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import msgspec
import pytest

from attnfuzz.bench.tuning_tree import Tuned
from tests.unit.in_process import attnfuzz

KERNELS = Path(__file__).parent / "timed_kernels.py"


def tune(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        return attnfuzz("bench", "tune", *arguments, cwd=cwd)


def test_without_a_gpu_it_refuses(tmp_path: Path) -> None:
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
    assert msgspec.json.decode((tmp_path / "tuned.json").read_bytes(), type=Tuned).configurations == 2


@pytest.mark.night
def test_what_cannot_be_tuned_is_one_sentence(tmp_path: Path) -> None:
    """A wrong name would end in a traceback."""
    run = tune(KERNELS, "--device", "cpu", cwd=tmp_path)
    assert run.returncode == 2
    assert "names 6 kernels; name one" in run.stderr
    run = tune(f"{KERNELS}:drops_the_last_key", "--device", "cpu", cwd=tmp_path)
    assert run.returncode == 2
    assert "only one configuration" in run.stderr
