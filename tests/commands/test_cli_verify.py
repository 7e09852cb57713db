"""``attnfuzz verify``: verdict, document and exit status, for kernel files and for FlashInfer-Bench solutions."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import click
import pytest

from attnfuzz.campaign import startup
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import CampaignResult
from attnfuzz.verdict import Failure
from tests.common.in_process import attnfuzz, ending_after
from tests.common.report_results import a_finding, a_result
from tests.common.solutions import DECODE, PREFILL, a_solution, write_solution

KERNEL = """
import attnfuzz
from attnfuzz.kernels import eager


@attnfuzz.kernel("dense_decode")
def mine(inputs):
    if inputs.q.shape[2] not in (16, 64):
        raise ValueError("head_size must be 16 or 64")
    out, lse = eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)
    return out, lse
"""
NARROW = KERNEL.replace(
    '"dense_decode"', '"dense_decode", supports=attnfuzz.Supports(dtypes=("float32",), strides="contiguous")'
)
WRONG = NARROW.replace("    return out, lse", "    out[inputs.seq_lens > 1] += 1\n    return out, lse")


def verify(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return attnfuzz("verify", *arguments, "--device", "cpu", "--workers", "1", cwd=cwd)


def document(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(run.stdout)
    assert told["format"] == "attnfuzz.verify/1"
    return told


@pytest.mark.night
def test_what_a_kernel_refuses_is_left_out_and_told(tmp_path: Path) -> None:
    """A kernel that says what it cannot do would fail, or nobody would learn what it was not judged on."""
    (tmp_path / "mine.py").write_text(KERNEL)
    with ending_after(cases=20):
        run = verify("mine.py", "--json", "--seed", "7", cwd=tmp_path)
    told = document(run)
    assert (run.returncode, told["verdict"], told["kernel"]) == (0, "pass", "mine.py:mine")
    assert (told["problem"], told["seed"], told["counterexample"]) == ("dense_decode", 7, None)
    assert 0 < told["max_error_ratio"] <= 1
    assert told["cases"] > 0
    assert {"attnfuzz", "torch"} <= told["environment"].keys()
    (limit,) = told["left_out"]
    assert (limit["field"], limit["how"]) == ("head_sizes", "raises")
    assert limit["declare"] == "Supports(head_sizes=(16, 64))"
    assert "head_size must be 16 or 64" in limit["said"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.night
def test_with_pedantic_nothing_is_left_out(tmp_path: Path) -> None:
    """There would be no way to hold a kernel to all that engines hand over."""
    (tmp_path / "mine.py").write_text(KERNEL)
    run = verify("mine.py", "--json", "--pedantic", cwd=tmp_path)
    found = document(run)["counterexample"]
    assert run.returncode == 1
    assert "head_size must be 16 or 64" in found["message"]


@pytest.mark.night
def test_the_script_of_a_wrong_kernel_fails_by_itself(tmp_path: Path) -> None:
    """Whoever gets the counterexample could not run it without attnfuzz's own search."""
    (tmp_path / "mine.py").write_text(WRONG)
    verify("mine.py:mine", "--save-dir", "found", cwd=tmp_path)
    (script,) = (tmp_path / "found").glob("*.py")
    replayed = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert replayed.returncode == 1, replayed.stderr


def test_what_only_its_author_knows_fails_with_the_declaration_that_would_answer_it(tmp_path: Path) -> None:
    """Whoever ordered a kernel for full batches could not tell a missing declaration from a bug."""
    (tmp_path / "mine.py").write_text(
        KERNEL.replace("    return", "    out[inputs.seq_lens == 0] = float('nan')\n    return")
    )
    run = verify("mine.py:mine", "--seed", "1", cwd=tmp_path)
    assert run.returncode == 1
    assert "if the kernel is not meant to take empty sequences, declare Supports(empty_sequences=False)" in run.stdout


def test_a_wrong_kernel_fails_with_its_smallest_case(tmp_path: Path) -> None:
    """Whoever asked would get no counterexample to work with."""
    (tmp_path / "mine.py").write_text(WRONG)
    run = verify("mine.py:mine", "--save-dir", "found", cwd=tmp_path)
    assert run.returncode == 1
    first, said, case, *_ = run.stdout.splitlines()
    assert first.startswith("FAIL  mine.py:mine  (")
    assert said.startswith("  accuracy: out[seq 0")
    assert "seq_lens 2" in case
    regression, script = sorted((tmp_path / "found").iterdir())
    assert (regression.suffix, script.suffix) == (".json", ".py")
    assert "not searched: it raises for head sizes" in run.stdout


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import nowhere", "mine.py does not import: ModuleNotFoundError: No module named 'nowhere'"),
        ("x = 1", "declares no kernel"),
        (KERNEL + KERNEL.replace("def mine", "def other"), "names 2 kernels (mine, other), and one is verified"),
    ],
)
@pytest.mark.by_day("import*")
def test_what_cannot_be_judged_is_one_sentence_and_a_document(source: str, words: str, tmp_path: Path) -> None:
    """A program that reads the document would find none, or take a file that does not load for a wrong kernel."""
    (tmp_path / "mine.py").write_text(source)
    run = verify("mine.py", "--json", cwd=tmp_path)
    told = document(run)
    assert (run.returncode, told["verdict"]) == (2, "error")
    assert words in told["error"]
    assert run.stderr == f"Error: {told['error']}\n"


def test_where_nothing_can_be_saved_is_said_before_the_search(tmp_path: Path) -> None:
    """The counterexample would be lost when it has been found."""
    (tmp_path / "mine.py").write_text(KERNEL)
    run = verify("mine.py", "--save-dir", "mine.py", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "Error: --save-dir 'mine.py' is a file; name a folder\n"


@pytest.mark.parametrize(
    "solution",
    [
        a_solution(DECODE),
        a_solution(
            PREFILL,
            definition="gqa_paged_prefill_causal_h4_kv2_d64_ps16",
            spec={"language": "triton", "destination_passing_style": False},
        ),
    ],
    ids=["decode", "prefill"],
)
@pytest.mark.by_day("decode")
def test_a_right_solution_passes(solution: dict[str, Any], tmp_path: Path) -> None:
    """FlashInfer-Bench's arguments would be in another order or of another meaning than its definitions say."""
    write_solution(tmp_path, solution)
    with ending_after(cases=5):
        run = verify("solution.json", "--json", cwd=tmp_path)
    told = document(run)
    assert (run.returncode, told["verdict"], told["kernel"]) == (0, "pass", "solution.json")
    assert told["cases"] > 0
    assert 'where=({"num_q_heads": 4, "num_kv_heads": 2},)' in told["declared"]


@pytest.mark.night
def test_a_wrong_solution_fails_and_is_kept_with_its_sources(tmp_path: Path) -> None:
    """The saved case would name a kernel in a folder that is gone."""
    write_solution(tmp_path, a_solution(DECODE.replace("head // group", "head % k.shape[1]")))
    run = verify("solution.json", "--json", "--save-dir", "found", cwd=tmp_path)
    found = document(run)["counterexample"]
    assert run.returncode == 1
    assert "query head 1 reads KV head 1, expected 0" in " ".join((found["message"], *found["details"]))
    again = attnfuzz("replay", found["regression"], cwd=tmp_path)
    assert again.returncode == 1, again.stderr
    assert found["script"] is None


def test_a_solution_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    """A traceback, or exit status 1 as of a kernel that is wrong."""
    write_solution(tmp_path, a_solution(definition="gemm_n128_k2048"))
    run = verify("solution.json", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("Error: solution 'solution.json': definition='gemm_n128_k2048' is none that attnfuzz")
    assert run.stderr.count("\n") == 1


def judged(monkeypatch: pytest.MonkeyPatch, result: CampaignResult) -> None:
    """Have ``verify`` come to ``result``."""
    monkeypatch.setattr("attnfuzz.campaign.startup.run_campaign", lambda *asked, **how: result)


def a_result_of_one(*findings: Finding, **fields: Any) -> CampaignResult:
    result = a_result(*findings, **fields)
    for target in list(result.statistics.kernels)[1:]:
        del result.statistics.kernels[target]
    return result


def test_a_document_that_cannot_be_written_is_an_error_and_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk would leave an empty file and success, and the verdict would be lost."""
    judged(monkeypatch, a_result_of_one())
    with Path("/dev/full").open("w") as full, pytest.MonkeyPatch.context() as patched:
        patched.setattr("tests.common.in_process._stream", lambda: io.TextIOWrapper(io.BytesIO(), write_through=True))
        patched.setattr("click.echo", _echo_to(full))
        patched.setattr("attnfuzz.cli.output.detach_output", lambda **how: None)
        run = verify("mine.py", "--json", cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("PASS  mine.py")
    assert "Error: the document cannot be written: No space left on device" in run.stderr


def _echo_to(full: TextIO) -> Callable[..., None]:
    echo = click.echo

    def told(message: object = None, *, err: bool = False, **how: Any) -> None:
        if err:
            echo(message, err=True, **how)
        else:
            full.buffer.raw.write(message)  # type: ignore[attr-defined]

    return told


def test_the_document_and_the_sentence_say_what_was_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads PASS would take it for sequences of any length."""
    result = a_result_of_one()
    judged(monkeypatch, result)
    (kernel,) = result.statistics.kernels.values()
    told = document(verify("mine.py", "--json", cwd=tmp_path))
    assert told["largest"] == {"sequence": 40, "sequences": 3, "tokens": 57}
    assert told["covered"]["head size"] == ["pow2 to 64"]
    assert told["cases"] == kernel.cases
    run = verify("mine.py", cwd=tmp_path)
    assert f"({kernel.cases} cases of paged_decode, none longer than 40 tokens, in" in run.stdout


def test_a_failure_that_comes_before_the_search_is_not_one_of_no_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`FAIL (0 cases)` would look as if nothing had been run."""
    result = a_result_of_one(a_finding())
    (kernel,) = result.statistics.kernels.values()
    kernel.cases = 0
    judged(monkeypatch, result)
    told = verify("mine.py", cwd=tmp_path).stdout.splitlines()[0]
    assert "FAIL" in told
    assert ", before the search of cases began, in " in told
    assert "0 cases" not in told


def test_a_failure_that_could_not_be_confirmed_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that kills its process now and then would pass."""
    dead = Failure(oracle="crash", kind="SIGKILL", message="the kernel's process was killed by SIGKILL")
    judged(monkeypatch, a_result_of_one(unconfirmed=(a_finding(failure=dead),)))
    run = verify("mine.py", "--json", cwd=tmp_path)
    assert (run.returncode, document(run)["verdict"]) == (2, "error")
    assert "could not be confirmed: the kernel's process was killed by SIGKILL" in run.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_128_and_the_signal(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stops a judge would be told that the kernel cannot be judged."""
    (tmp_path / "mine.py").write_text(KERNEL)
    result = a_result(stop_reason="interrupted", signal=int(number))
    monkeypatch.setattr(startup, "run_campaign", lambda *_, **__: result)
    run = verify("mine.py", "--json", cwd=tmp_path)
    assert run.returncode == 128 + number
    assert "interrupted before there was a verdict" in run.stderr
    assert document(run)["verdict"] == "error"


def test_the_environment_of_a_kernel_does_not_say_that_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel would behave where it is judged, and nowhere else."""
    before, seen = dict(os.environ), []

    def look(*_: object, **__: object) -> object:
        seen.append(dict(os.environ))
        return a_result(stop_reason="interrupted", signal=2)

    monkeypatch.setattr(startup, "run_campaign", look)
    (tmp_path / "mine.py").write_text(KERNEL)
    verify("mine.py", cwd=tmp_path)
    assert [{name for name in one if name not in before} for one in seen] == [set()]
