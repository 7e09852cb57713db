"""A kernel that never gives a result is told in one sentence, with what its author meant, and is no finding."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from attnfuzz.campaign.readiness import Readiness
from attnfuzz.declaration import KernelLoadError, load_kernels
from attnfuzz.judging.runner import Runner
from tests.campaign import misused_kernels
from tests.common.in_process import attnfuzz

FILE = os.path.relpath(misused_kernels.__file__)
ELSEWHERE = "; make every tensor on the device of the inputs: device=inputs.q.device"


def looked_at(runner: Runner, *names: str, infers: bool = True) -> Readiness:
    declarations = runner.declarations([f"{FILE}:{name}" for name in names])
    readiness = Readiness(
        runner, declarations, make_runner=lambda: pytest.fail("nothing is built"), note=lambda text: None, infers=infers
    )
    readiness.start()
    readiness.wait()
    return readiness


@pytest.mark.parametrize(
    ("name", "said", "remedy"),
    [
        (
            "misspelt",
            ": the kernel raised TypeError: misspelt() got an unexpected keyword argument 'num_splits'",
            "; options are passed by keyword: this one is num_splits; did you mean num_splits where it says num_split?",
        ),
        (
            "without_options",
            ": the kernel raised TypeError: ",
            "; options are passed by keyword: this one is num_splits",
        ),
        (
            "separate_tensors",
            ": the kernel raised TypeError: ",
            "; a kernel is called with its inputs alone, unless it declares options",
        ),
        (
            "other_name",
            ": the kernel raised AttributeError: 'DenseDecodeInputs' object has no attribute 'seq_len'",
            "; inputs has q, k, v, seq_lens, scale, max_seq_len, out, lse"
            "; did you mean seq_lens where it says seq_len?",
        ),
        (
            "lse_elsewhere",
            " on the device of its inputs: the kernel returned lse on meta; it must be on cpu",
            ELSEWHERE,
        ),
        (
            "out_elsewhere",
            " on the device of its inputs: the kernel returned out on meta; it must be on cpu",
            ELSEWHERE,
        ),
        pytest.param(
            "elsewhere", "", ELSEWHERE, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
        ),
    ],
)
@pytest.mark.by_day("misspelt*", "other_name*", "*_elsewhere*")
def test_what_was_meant_is_told(runner: Runner, name: str, said: str, remedy: str) -> None:
    """It would be a finding in a saved case, after thousands of runs that all say the same."""
    readiness = looked_at(runner, name, infers=False)
    (why,) = readiness.never_returned.values()
    assert why.startswith(f"never returned a result{said}")
    assert why.endswith(remedy)
    assert readiness.take() == []
    with pytest.raises(KernelLoadError, match=f"{name} never returned a result"):
        readiness.wait_for_first()


@pytest.mark.night
def test_whatever_it_raises_and_others_are_searched(runner: Runner) -> None:
    """One file that is no kernel yet would end a search over all others, or be told as a bug."""
    readiness = looked_at(runner, "leaves", "fine")
    (why,) = readiness.never_returned.values()
    assert why.startswith("never returned a result: the kernel raised SystemExit: 3")
    readiness.wait_for_first()
    assert [one.kernel.name for one in readiness.take() if one.is_settled] == ["fine"]


@pytest.mark.parametrize("name", ["sometimes", "lse_of_long_elsewhere"])
def test_a_kernel_that_fails_in_some_cases_has_a_bug(runner: Runner, name: str) -> None:
    """A misspelt name on one path of a kernel would never be found."""
    readiness = looked_at(runner, name, infers=False)
    assert readiness.never_returned == {}
    assert [one.kernel.name for one in readiness.take() if one.is_settled] == [name]


def test_a_kernel_that_needs_longer_tables_has_a_bug(runner: Runner) -> None:
    """An index that small batches do not have would end a search before the bugs of larger ones."""
    assert looked_at(runner, "of_three_pages").never_returned == {}


@pytest.mark.parametrize("name", ["swapped", "in_float64", "flattened"])
def test_a_result_of_another_kind_is_a_finding(runner: Runner, name: str) -> None:
    """`verify` would say of a wrong solution that it could not be judged."""
    readiness = looked_at(runner, name)
    assert readiness.never_returned == {}
    assert [one.kernel.name for one in readiness.take() if one.is_settled] == [name]


@pytest.mark.night
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("other_name", ": the kernel raised AttributeError: "),
        ("lse_elsewhere", " on the device of its inputs: the kernel returned lse on meta; it must"),
    ],
)
@pytest.mark.parametrize("command", ["explore", "verify", "declare"])
def test_the_command_ends_at_once_and_saves_nothing(command: str, name: str, said: str, tmp_path: Path) -> None:
    """A CI job would fail with a finding where the file is wrong."""
    source = Path(misused_kernels.__file__)
    (tmp_path / "k.py").write_text(source.read_text())
    run = attnfuzz(command, f"k.py:{name}", "--budget", "300s", "--device", "cpu", cwd=tmp_path)
    assert run.returncode == 2, run.stdout + run.stderr
    assert f"k.py:{name} never returned a result{said}" in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not (tmp_path / "regressions").exists()


@pytest.mark.night
def test_beside_others_it_is_told_and_no_success(tmp_path: Path) -> None:
    """The search of the others would hide it."""
    (tmp_path / "k.py").write_text(Path(misused_kernels.__file__).read_text())
    run = attnfuzz(
        "explore", "k.py:fine", "k.py:other_name", "--budget", "5s", "--device", "cpu", "--json", "a.json", cwd=tmp_path
    )
    assert run.returncode == 2, run.stdout + run.stderr
    assert "\nk.py:other_name never returned a result: the kernel raised AttributeError" in run.stdout
    assert "never reached" not in run.stdout
    (named,) = [one for one in json.loads((tmp_path / "a.json").read_text())["kernels"] if one["name"] == "other_name"]
    assert named["never_returned"].startswith("never returned a result: the kernel raised AttributeError")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import attnfuzz\n\n\n@attnfuzz.kernel\ndef mine(inputs): ...\n",
            "@attnfuzz.kernel stands before mine without parentheses; name the problem that it is for: "
            '@attnfuzz.kernel("paged_decode")',
        ),
        ("import attnfuzz\n\nattnfuzz.Supports(layout=('NHD',))\n", "; did you mean Supports(layouts=...)?"),
        ("import attnfuzz\n\nattnfuzz.Numerics(querys='scaled')\n", "; did you mean Numerics(query=...)?"),
    ],
)
def test_a_declaration_that_is_misspelt_is_told_with_what_was_meant(source: str, said: str, tmp_path: Path) -> None:
    """Whoever writes a first kernel would have to look the names up."""
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(KernelLoadError) as refused:
        load_kernels(str(file))
    assert said in str(refused.value)
