"""Oracles that a user's file defines: asked, named, saved and replayed as those of attnfuzz are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import attnfuzz
from attnfuzz.campaign.saved.replay import run_saved
from attnfuzz.corpus import load_regression
from attnfuzz.declaration import KernelLoadError, load_kernels
from attnfuzz.isolation.outcomes import ExecutorUnavailable
from attnfuzz.judging.judge import judge, judge_batch
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.own import OracleError, Run
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.testing.loading import shared_runner
from tests.common.in_process import attnfuzz as run_command
from tests.common.in_process import ending_after
from tests.oracles import oracles_that_fail as failing
from tests.oracles import own_oracle_kernels as beside

PAGE = Path(__file__).parents[2] / "docs" / "own_oracles.md"
CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=16, scale=0.25, seq_lens=(3, 0))
NAME = "empty_rows_are_plus_zero"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The file of the page, in a project of its own."""
    (tmp_path / "pyproject.toml").write_text('[tool.attnfuzz]\nregressions = "regressions"\n')
    (code,) = re.findall(r"```python\n# kernels.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "kernels.py").write_text(code)
    return tmp_path


def explore(*arguments: object, cwd: Path) -> Any:
    options = ("--workers", "1", "--device", "cpu", "--seed", "3", "--budget", "60s", "--fail-fast")
    return run_command("explore", "kernels.py", *arguments, *options, cwd=cwd)


def test_the_oracle_of_the_page_finds_saves_and_replays(page: Path) -> None:
    """What a user's oracle sees would get lost between the executor and the saved case, or go by another name."""
    run = explore("--json", "all.json", "--html", "all.html", "--junit", "all.xml", cwd=page)
    assert run.returncode == 1, run.stdout + run.stderr
    for line in re.findall(r"^1\. .*?$|^   .*$", PAGE.read_text().partition("```text\n")[2].partition("```")[0], re.M):
        assert line in run.stdout
    (kernel,) = json.loads((page / "all.json").read_text())["kernels"]
    (finding,) = kernel["findings"]
    assert (finding["oracle"], finding["signature"]) == (NAME, f"{NAME} [empty sequence]")
    assert finding["in_contract"]  # and no question whether the kernel was meant for such sequences
    assert '<span class="badge oracle" title="' in (page / "all.html").read_text()
    assert f'type="{NAME}"' in (page / "all.xml").read_text()

    saved = page / finding["path"]
    assert load_regression(saved).finding.oracle == NAME
    fails = run_command("replay", saved, cwd=page)
    assert (fails.returncode, f"{NAME}: 16 elements of rows without keys are -0.0" in fails.stdout) == (1, True)
    refused = run_command("repro", saved, cwd=page)
    assert (refused.returncode, "an oracle of the kernel's own file" in refused.stderr) == (2, True)

    right = (page / "kernels.py").read_text().replace("= -0.0", "= 0.0")
    (page / "kernels.py").write_text(right)
    assert "1 open case now passing" in run_command("replay", saved, cwd=page).stdout
    (page / "kernels.py").write_text(right.replace(f"def {NAME}", "def something_else"))
    unknown = run_command("replay", saved, cwd=page)
    assert unknown.returncode == 2
    assert f"no oracle is called '{NAME}': neither attnfuzz nor the file of kernels.py:decode has one" in unknown.stdout


def test_what_is_not_asked_finds_nothing_and_what_does_not_exist_is_refused(page: Path) -> None:
    """--oracle would mean something else for a user's oracle than for one of attnfuzz's."""
    with ending_after(cases=20):
        usual = explore("--oracle", "accuracy", "--pedantic", cwd=page)
    assert (usual.returncode, "nothing found by accuracy" in usual.stdout) == (0, True)
    misspelt = explore("--oracle", "empty_rows_are_plus_zeros", cwd=page)
    assert misspelt.returncode == 2
    assert f"no oracle is called 'empty_rows_are_plus_zeros'; did you mean '{NAME}'?" in misspelt.stderr


@pytest.mark.parametrize("how_many", ["one", "many"])
def test_it_is_asked_of_each_case_alone_and_in_a_batch(how_many: str) -> None:
    """In a batch nobody would look at a case that shows no symptom."""
    kernel = beside.negative_zero

    def judged(**how: Any) -> Any:
        if how_many == "one":
            return judge(kernel, CASE, device="cpu", **how).failure
        return judge_batch(kernel, [CASE, CASE], device="cpu", **how)[1].failure

    failure = judged()
    assert (failure.oracle, failure.name, failure.message) == (NAME, NAME, "32 elements are -0.0")
    assert failure.details == ("in rows without keys",)
    assert judged(oracles=["own"]).oracle == judged(oracles=[NAME]).oracle == NAME
    assert judged(oracles=["accuracy"]) is None


def test_it_is_asked_only_where_all_others_are_content() -> None:
    """A wrong number would be told in the words of somebody who looked for something else."""
    failure = judge(beside.wrong, CASE, device="cpu").failure
    assert failure is not None
    assert failure.oracle == "accuracy"


def test_a_run_holds_what_the_page_says() -> None:
    """A user's oracle could not tell what is wrong, or would change what others judge."""
    (seen,) = beside.seen_of(CASE)
    assert isinstance(seen, Run)
    assert seen.case == CASE
    assert set(seen.results) == {"out", "lse"} == set(seen.expected)
    assert seen.expected["out"].dtype == torch.float64
    assert seen.results["out"].shape == seen.expected["out"].shape == seen.inputs.q.shape
    assert seen.inputs.seq_lens.tolist() == [3, 0]
    assert seen.inputs.k[1].isnan().all()
    torch.testing.assert_close(seen.results["out"].double(), seen.expected["out"], atol=1e-2, rtol=1e-2)


def test_an_own_problems_results_are_given_too() -> None:
    """Who defines a problem would have no oracle for it."""
    with pytest.raises(attnfuzz.KernelFailure, match="fails doubled_is_even: it is odd") as caught:
        attnfuzz.fuzz(beside.doubled, max_examples=100, device="cpu")(lambda: None)()
    assert caught.value.failure.oracle == "doubled_is_even"


def test_an_assertion_is_an_objection() -> None:
    """The usual way to say what must hold would end the search."""
    failure = judge(failing.right, CASE, device="cpu", oracles=["asserts_with_words"]).failure
    assert failure is not None
    assert failure.message == "not so"
    failure = judge(failing.right, CASE, device="cpu", oracles=["asserts_without"]).failure
    assert failure is not None
    assert failure.message == "this does not hold: Nothing is as it is."


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "raises",
            "the oracle raises raised KeyError: 'lse of another kernel'; what is wrong with a kernel it returns",
        ),
        ("returns_a_tensor", "the oracle returns_a_tensor returned tensor(True); it must return a sentence, or None"),
    ],
)
def test_one_that_cannot_judge_says_so(name: str, sentence: str) -> None:
    """A mistake in the oracle would be a bug of the kernel, or an oracle that never objects."""
    with pytest.raises(OracleError, match=re.escape(sentence)):
        judge(failing.right, CASE, device="cpu", oracles=[name])
    declaration = shared_runner("cpu").declarations([f"{failing.__file__}:right"])[0]
    with Runner(device="cpu", oracles=[name]) as runner, pytest.raises(ExecutorUnavailable, match=re.escape(sentence)):
        runner.judge(declaration, CASE)


def test_a_kernel_declares_the_oracles_of_its_file() -> None:
    """The driver could not tell a misspelt name from an oracle, nor a saved case that nobody can judge."""
    declaration = shared_runner("cpu").declarations([f"{beside.__file__}:negative_zero"])[0]
    assert declaration.oracles == (NAME, "doubled_is_even", "remembers")


def test_names_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Two oracles of one name, or one that is called as attnfuzz's are, would be one in all that is told."""
    with pytest.raises(ValueError, match="attnfuzz has an oracle that is called 'accuracy'"):

        @attnfuzz.oracle
        def accuracy(run: Run) -> None:
            pass

    with pytest.raises(ValueError, match="stands before a function, without parentheses"):
        attnfuzz.oracle("name")  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ValueError, match="an oracle cannot be called '<lambda>'"):
        attnfuzz.oracle(lambda run: None)
    (tmp_path / "twice.py").write_text(
        "import attnfuzz\n\n\ndef made():\n    @attnfuzz.oracle\n    def one(run):\n        pass\n    return one\n\n\n"
        'a, b = made(), made()\n\n\n@attnfuzz.kernel("dense_decode")\ndef kernel(inputs):\n    pass\n'
    )
    with pytest.raises(KernelLoadError, match="there are two oracles that are called 'one'"):
        load_kernels(str(tmp_path / "twice.py"))


def test_another_kernel_is_not_blamed_for_what_its_file_does_not_ask(page: Path) -> None:
    """A case of one file, replayed on a kernel of another one, would pass without having been judged."""
    run = explore("--oracle", NAME, cwd=page)
    (saved,) = (page / "regressions").glob("*.json")
    regression = load_regression(saved)
    assert run.returncode == 1
    bundled = shared_runner("cpu").declarations(["dense_eager"])[0]
    verdict = run_saved(regression, bundled, shared_runner("cpu")).verdict
    assert verdict.failure is None
    assert f"no oracle is called '{NAME}'" in verdict.not_runnable
