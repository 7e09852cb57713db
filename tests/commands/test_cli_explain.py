"""`attnfuzz explain` and `attnfuzz repro`: what is wrong with a case, where, and how others see it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attnfuzz.corpus import FindingRecord, Regression, write_regression
from attnfuzz.problems.cases import DenseDecodeCase
from tests.common.in_process import attnfuzz
from tests.common.saved_findings import a_finding, save

COMMAND = Path(sys.executable).with_name("attnfuzz")
CASE = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(3,), scale=0.25, dtype="float32")

DROPS_THE_LAST = """
import attnfuzz
from attnfuzz.kernels import eager


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(dtypes=("float32",), head_sizes=(16,)))
def mine(inputs):
    lens = inputs.seq_lens - (inputs.seq_lens > 1).int()  # the bug
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, lens, inputs.scale)
"""


def explain(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return attnfuzz("explain", *arguments, "--device", "cpu", cwd=folder)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A finding of a kernel that drops the last token."""
    (tmp_path / "mine.py").write_text(DROPS_THE_LAST)
    record = FindingRecord(oracle="accuracy", message="wrong")
    regression = Regression(problem="dense_decode", kernel="mine.py:mine", case=CASE, finding=record)
    return write_regression(regression, tmp_path)


def test_a_failing_case_is_explained(saved: Path) -> None:
    """The command would not say what is wrong, or not everywhere that it is asked to."""
    run = explain(saved.parent, saved, "-o", "e.svg", "--json", "e.json")
    assert run.returncode == 1, run.stderr
    assert "token 2 has weight 0, expected 0.3333" in run.stdout
    assert "passes if changed to: seq_len 2 instead of 3" not in run.stdout  # two tokens are still more than one
    assert "token 2 has weight 0" in (saved.parent / "e.svg").read_text()
    assert json.loads((saved.parent / "e.json").read_text())["kernel"].endswith("mine.py:mine")


OF_ITS_OWN = """
import attnfuzz
import torch


class Scaled(attnfuzz.Problem):
    seed = attnfuzz.Seed()

    def tensors(self, case):
        roles = {"a": "input", "b": "input", "out": "output"}
        return {name: attnfuzz.TensorSpec((4,), "float32", role) for name, role in roles.items()}

    def write(self, case, tensors):
        for name in ("a", "b"):
            tensors[name].copy_(attnfuzz.numbers((4,), seed=case.seed, name=name))

    def reference(self, case, tensors):
        return {"out": tensors["a"].double() + 2 * tensors["b"].double()}


@attnfuzz.kernel(Scaled())
def mine(inputs):
    inputs.out.copy_(3 * inputs.a)  # the bug
"""


def test_what_is_taken_for_another_of_an_own_problem_is_told(tmp_path: Path) -> None:
    """A search told it; the command that the report sends a reader to, so that it looks further, said less."""
    (tmp_path / "mine.py").write_text(OF_ITS_OWN)
    case = {
        "format": "attnfuzz.regression/1",
        "problem": "mine.py:Scaled",
        "kernel": "mine.py:mine",
        "fields": {"seed": {"type": "seed"}},
        "case": {"seed": 1},
        "finding": {"oracle": "accuracy", "message": "wrong"},
    }
    (tmp_path / "case.json").write_text(json.dumps(case))
    run = explain(tmp_path, "case.json")
    assert run.returncode == 1, run.stderr
    assert "a is read in place of b" in run.stdout


def test_a_case_that_passes_says_so(saved: Path) -> None:
    """A repaired kernel would be explained as if it still failed."""
    run = explain(saved.parent, saved, "--kernel", "dense_eager")
    assert run.returncode == 0, run.stderr
    assert "the case passes" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("-o", "e.pdf"), "'e.pdf' must end in .svg or .png"),
        (("--kernel", "paged_eager"), "is a case of dense_decode, but kernel 'paged_eager' computes paged_decode"),
        (("-o", "missing/e.svg"), "cannot be written"),
    ],
)
def test_wrong_usage_is_refused_in_one_sentence(saved: Path, arguments: tuple[str, ...], sentence: str) -> None:
    """A user would see a traceback, or find the mistake only once all runs are done."""
    run = explain(saved.parent, saved, *arguments)
    assert run.returncode == 2
    assert sentence in run.stderr
    assert run.stderr.count("\n") == 1, run.stderr


@pytest.mark.parametrize(
    ("oracle", "kind", "said"),
    [
        ("value_affinity", "bits", "was found by value_affinity: "),
        ("value_affinity", "bits", "use attnfuzz replay"),
        ("sanitizer", "memcheck: Invalid __global__ read of size 2 bytes", "replay it with --sanitizer"),
    ],
)
def test_a_finding_that_takes_more_than_its_case_is_no_script(
    oracle: str, kind: str, said: str, tmp_path: Path
) -> None:
    """The script would run the case alone, which passes, and say so to whoever reads the issue."""
    path = save(tmp_path, a_finding(3, oracle=oracle, kind=kind)).path
    told = attnfuzz("repro", path, cwd=tmp_path)
    assert told.returncode == 2
    assert said in told.stderr


KERNELS = Path(__file__).parents[1] / "common" / "rounding_kernels.py"


@pytest.mark.night
def test_reports_name_the_line_of_a_rounding(tmp_path: Path) -> None:
    """A maintainer would be told what is rounded, and have to find out where."""
    shutil.copy(KERNELS, tmp_path / "mine.py")
    command = [str(COMMAND), "explore", "mine.py:rounded_products", "--budget", "20s", "--workers", "1", "--seed", "1"]
    command += ["--save-dir", "saved", "--json", "found.json", "--html", "found.html", "--device", "cpu"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 1, run.stderr
    lines = (tmp_path / "mine.py").read_text(encoding="utf-8").splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith("  # products"))
    look = f"look at mine.py:{number}: `{lines[number - 1].strip()}`"
    assert look in run.stdout
    (kernel,) = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["kernels"]
    rounded = [finding for finding in kernel["findings"] if finding["cause"].startswith("scores_rounded")]
    assert [finding["sources"] for finding in rounded] == [
        [{"file": "mine.py", "line": number, "text": lines[number - 1].strip()}]
    ]
    saved = json.loads((tmp_path / rounded[0]["path"]).read_text(encoding="utf-8"))
    assert saved["finding"]["sources"] == rounded[0]["sources"]
    assert f"mine.py:{number}" in (tmp_path / "found.html").read_text(encoding="utf-8")
    shown = subprocess.run(
        [str(COMMAND), "explain", rounded[0]["path"], "--device", "cpu", "--json", "explained.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert look in shown.stdout
    explained = json.loads((tmp_path / "explained.json").read_text(encoding="utf-8"))
    assert explained["explanation"]["sources"] == rounded[0]["sources"]
