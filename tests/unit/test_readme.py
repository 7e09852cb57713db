"""The README's example, run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnfuzz.corpus import decode_regression

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def block(language: str, first_line: str = "") -> str:
    """The one block of ``language`` that starts with ``first_line``."""
    (found,) = (text for name, text in BLOCKS if name == language and text.startswith(first_line))
    return found


def attnfuzz(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attnfuzz", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader has typed in the kernel and its test."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("my_decode.py", "test_my_decode.py"):
        (folder / name).write_text(block("python", f"# {name}\n"), encoding="utf-8")
    (folder / "pyproject.toml").write_text(block("toml"), encoding="utf-8")
    return folder


DROPS_A_TOKEN = """
import torch

import attnfuzz

torch.manual_seed(0)
scale, block_table = 0.125, torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
q = torch.randn(2, 2, 64, dtype=torch.float16)
k_cache, v_cache = torch.randn(2, 6, 16, 1, 64, dtype=torch.float16)
seq_lens = torch.tensor([9, 17], dtype=torch.int32)


def test_it():
    out, lse = torch.zeros_like(q), torch.zeros(2, 2)
    for i, length in enumerate((9, 16)):
        k, v = (part[block_table[i].long()].flatten(0, 1)[:length, 0].float() for part in (k_cache, v_cache))
        scores = q[i].float() @ k.T * scale
        out[i], lse[i] = scores.softmax(-1) @ v, scores.logsumexp(-1)
"""


def test_the_one_line_for_a_test_says_what_is_shown(tmp_path: Path) -> None:
    """Who has a suite would begin with a line that does not run, or says something else."""
    line = block("python", "attnfuzz.assert_close").replace("\n", "\n    ")
    (tmp_path / "test_it.py").write_text(f"{DROPS_A_TOKEN}    {line}", encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert run.returncode == 1, run.stderr
    assert " ".join(block("text", "AssertionError").split()) in " ".join(run.stdout.split())


def test_example_is_found_replayed_and_repaired(folder: Path) -> None:
    """The first thing that a reader tries would not work as described."""
    explored = attnfuzz(folder, "explore", "my_decode.py", "--budget", "60s", "--fail-fast")
    assert explored.returncode == 1, explored.stderr
    (saved,) = (folder / "regressions").iterdir()
    shown = [line for line in block("console").splitlines() if "..." not in line and not line.startswith("$")]
    assert [line for line in shown if line.strip() not in explored.stdout] == []
    assert attnfuzz(folder, "replay").returncode == 1

    kernel_file = folder / "my_decode.py"
    before, after = (re.search(rf"^\{sign}(.*)$", block("diff"), re.MULTILINE) for sign in "-+")
    assert before is not None
    assert after is not None
    source = kernel_file.read_text(encoding="utf-8")
    assert source.count(before[1]) == 1
    kernel_file.write_text(source.replace(before[1], after[1]), encoding="utf-8")
    assert attnfuzz(folder, "replay").returncode == 0

    saved.write_text(saved.read_text(encoding="utf-8").replace('"open"', '"fixed"'), encoding="utf-8")
    (folder / "tests").mkdir()
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_decode.py", "regressions"],
        cwd=folder, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert tests.returncode == 0, tests.stdout


def test_regression_file_is_valid() -> None:
    """The format shown would be refused."""
    assert decode_regression(block("json").encode(), "README.md").status == "open"
