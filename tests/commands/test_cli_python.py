"""--python of attnfuzz replay, explore, explain and bisect: kernels run in other environments, which are compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnfuzz.corpus import FindingRecord, Regression, load_regression, write_regression
from attnfuzz.problems.cases import DenseDecodeCase
from tests.common.environment_stand_ins import make_environment
from tests.common.in_process import attnfuzz

KERNEL = """
import importlib.metadata
import attnfuzz
from attnfuzz.kernels import eager

SUPPORTS = attnfuzz.Supports(dtypes=("float32",), head_sizes=(16,), strides="contiguous")


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def mine(inputs):
    out, lse = eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)
    if importlib.metadata.version("triton") >= "3.8":
        out[inputs.seq_lens > 1] += 1
    return out, lse
"""
CASE = DenseDecodeCase(dtype="float32", num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(3,), scale=0.25)

WITHOUT_TORCH = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "numpy", "jaxtyping"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuses())
from attnfuzz.cli import main
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a kernel that a Triton of later than 3.7 breaks, a case of it, and environments with several."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pyproject.toml").touch()
    (folder / "kernels.py").write_text(KERNEL)
    finding = FindingRecord(oracle="accuracy", message="wrong")
    regression = Regression(problem="dense_decode", kernel="kernels.py:mine", case=CASE, finding=finding)
    write_regression(regression, folder / "regressions").rename(folder / "regressions" / "case.json")
    for version in ("3.6.0", "3.7.0", "3.8.0", "3.9.0"):
        make_environment(folder / version, triton=version)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return attnfuzz(*arguments, cwd=folder)


@pytest.mark.night
def test_what_differs_between_two_environments_is_told(folder: Path) -> None:
    """A case that a new Triton breaks would be one more that fails, and its reader look into the kernel."""
    done = run(folder, "replay", "--python", "3.7.0", "--python", "3.9.0/bin/python", "--json", "replay.json")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "kernels.py:mine  passes with Triton 3.7.0, fails with Triton 3.9.0" in done.stdout
    document = json.loads((folder / "replay.json").read_text())
    paths = [str(folder / version / "bin" / "python") for version in ("3.7.0", "3.9.0")]
    assert [(one["python"], one["outcome"]) for one in document["results"]] == list(
        zip(paths, ["pass", "fail"], strict=True)
    )
    assert [(one["python"], one["versions"]["triton"]) for one in document["environments"]] == list(
        zip(paths, ["3.7.0", "3.9.0"], strict=True)
    )
    (difference,) = document["differences"]
    assert [one["outcome"] for one in difference["outcomes"]] == ["passes", "fails"]


def test_a_driver_without_torch_runs_kernels_elsewhere(folder: Path) -> None:
    """Whoever compares two environments would need a third with gigabytes of packages that run nothing."""
    command = [sys.executable, "-c", WITHOUT_TORCH, "replay", "--python", "3.7.0"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "1 saved case, 1 run: 0 failed; 1 open case passing there" in done.stdout


@pytest.mark.night
def test_bisect_names_the_first_that_fails(folder: Path) -> None:
    """A user would replay in one environment after the other, and compare by hand."""
    pythons = [argument for one in ("3.6.0", "3.7.0", "3.8.0", "3.9.0") for argument in ("--python", one)]
    done = run(folder, "bisect", "regressions/case.json", *pythons, "--json", "bisect.json")
    assert done.returncode == 1, done.stdout + done.stderr
    new, old = (folder / version / "bin" / "python" for version in ("3.8.0", "3.7.0"))
    assert f"first fails with Triton 3.8.0 ({new}); passes with Triton 3.7.0 ({old})" in done.stdout
    document = json.loads((folder / "bisect.json").read_text())
    assert document["first_failing"] == str(new)
    passing = run(folder, "bisect", "regressions/case.json", *pythons[:4])
    assert passing.returncode == 0, passing.stdout + passing.stderr


@pytest.mark.night
def test_a_campaign_is_shared_out_and_its_findings_run_everywhere(folder: Path) -> None:
    """A finding would not say that the other environment passes, or its file name versions that never ran it."""
    arguments = ("--workers", "1", "--seed", "3", "--save-dir", "found", "--json", "summary.json")
    done = run(folder, "explore", "kernels.py", "--budget", "10s", *arguments, "--python", "3.7.0", "--python", "3.9.0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "passes with Triton 3.7.0, fails with Triton 3.9.0" in done.stdout
    document = json.loads((folder / "summary.json").read_text())
    (finding,) = document["kernels"][0]["findings"]
    new = str(folder / "3.9.0" / "bin" / "python")
    assert finding["python"] == new
    assert [one["outcome"] for one in finding["outcomes"]] == ["passes", "fails"]
    assert [one["versions"]["triton"] for one in document["environments"]] == ["3.7.0", "3.9.0"]
    assert load_regression(folder / finding["path"]).environment.versions["triton"] == "3.9.0"
    assert f"attnfuzz replay {finding['path']} --python {new}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("replay", "--python", "none"), "--python 'none' does not exist"),
        (("explore", "kernels.py", "--python", "regressions"), "a folder without bin/python"),
        (("explain", "regressions/case.json", "--python", "kernels.py"), "cannot be run"),
        (("bisect", "regressions/case.json", "--python", "3.6.0"), "name two or more, the oldest first"),
        (("bisect", "regressions/case.json", "--python", "3.6.0", "--python", "3.6.0"), "named twice"),
        (("replay", "--python", "3.6.0", "--sanitizer", "memcheck"), "--python does not go with --sanitizer"),
        (("explore", "--resume", "--python", "3.6.0", "--python", "3.7.0"), "--resume goes on in one environment"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: tuple[str, ...], words: str, folder: Path) -> None:
    """A wrong path would be a traceback, or be taken for a case that fails."""
    done = run(folder, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.night
def test_a_kernel_that_no_environment_has_is_judged_nowhere(folder: Path) -> None:
    """A misspelt kernel would count as one that passes in all environments."""
    done = run(
        folder, "bisect", "regressions/case.json", "--kernel", "kernels.py:no", "--python", "3.6.0", "--python", "3.7.0"
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "is judged in no environment: no kernel 'no' in kernels.py" in done.stderr
