"""The pytest plugin, seen from a project that keeps regressions and a kernel of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from attnfuzz.corpus import FindingRecord, Regression, encode_regression
from attnfuzz.problems.cases import case_from_builtins
from attnfuzz.pytest_plugin import pytest_addoption

KERNEL = """
import attnfuzz
import torch

@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(dtypes=("float32",), gqa_ratios=(1,)))
def drops_a_token(inputs):
    out, lse = torch.zeros_like(inputs.q), torch.full(inputs.q.shape[:2], -torch.inf)
    for i, length in enumerate(inputs.seq_lens.tolist()):
        length -= length > 8
        scores = (inputs.q[i] * inputs.k[i, :length]).sum(-1) * inputs.scale
        out[i] = (scores.softmax(0)[..., None] * inputs.v[i, :length]).sum(0)
        lse[i] = scores.logsumexp(0)
    return out, lse
"""
PROJECT = """
[tool.attnfuzz]
regressions = "saved"
on = ["*"]

[tool.pytest.ini_options]
filterwarnings = ["error"]
"""
TARGET = "kernels.py:drops_a_token"


def regression(length: int, **changes: Any) -> Regression:
    fields = {
        "num_q_heads": 1,
        "num_kv_heads": 1,
        "head_size": 16,
        "dtype": "float32",
        "seq_lens": [length],
        "scale": 0.25,
    }
    finding = FindingRecord(oracle="accuracy", message="out is wrong")
    return Regression(
        **{
            "problem": "dense_decode",
            "kernel": TARGET,
            "case": case_from_builtins("dense_decode", fields),
            "finding": finding,
            **changes,
        }
    )


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A kernel that is wrong for more than 8 tokens, and a folder for regressions."""
    pytester.makepyprojecttoml(PROJECT)
    (pytester.path / "kernels.py").write_text(KERNEL, encoding="utf-8")
    (pytester.path / "saved").mkdir()
    return pytester


def save(project: pytest.Pytester, name: str, content: Regression | str) -> None:
    data = encode_regression(content) if isinstance(content, Regression) else content.encode()
    (project.path / name).write_bytes(data)


def outcomes(output: str) -> dict[str, str]:
    """The outcome of every test, from a verbose run by pytest-xdist."""
    lines = re.findall(r"\[gw\d\] \[ *\d+%\] (\w+) \.\./(saved/\S+::\S+)", output)
    return {test: outcome for outcome, test in lines}


def test_each_kernel_is_held_to_the_status(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open case would fail the run, a repaired one or one that is back would not, or other kernels be skipped.

    Run from another folder, workers of pytest-xdist would collect other tests than each other, or miss a kernel's file.
    """
    save(project, "saved/open.json", regression(9))
    save(project, "saved/repaired.json", regression(8, issue="https://example.org/issues/12"))
    save(project, "saved/fixed.json", regression(8, status="fixed"))
    save(project, "saved/back.json", regression(9, status="fixed"))
    save(project, "saved/gone.json", regression(9, kernel="kernels.py:drop_a_token"))
    elsewhere = FindingRecord(oracle="graph_replay", message="the bits must be equal")  # seen on a GPU only
    save(project, "saved/elsewhere.json", regression(8, finding=elsewhere))
    monkeypatch.chdir(project.mkdir("elsewhere"))
    places = ("--rootdir", str(project.path), str(project.path / "saved"))
    result = project.runpytest_subprocess("-v", "-n", "2", *places)
    assert outcomes(result.stdout.str()) == {
        f"saved/open.json::{TARGET}": "XFAIL",
        f"saved/repaired.json::{TARGET}": "FAILED",
        f"saved/fixed.json::{TARGET}": "PASSED",
        f"saved/back.json::{TARGET}": "FAILED",
        "saved/gone.json::kernels.py:drop_a_token": "FAILED",
        f"saved/elsewhere.json::{TARGET}": "XPASS",
        **{
            f"saved/{name}.json::{kernel}": "PASSED"
            for name in ("open", "repaired", "fixed", "back", "gone", "elsewhere")
            for kernel in ("dense_naive", "dense_eager")
        },
    }
    result.stdout.fnmatch_lines(
        [
            f"{TARGET} fails accuracy/out:value: *token 8 of sequence 0*",
            "replay:",
            f"  attnfuzz replay ../saved/back.json --kernel {TARGET}",
            "*XPASS(strict)*open, https://example.org/issues/12: *; once repaired: *--fixed ../saved/repaired.json*",
        ]
    )
    result.stdout.fnmatch_lines(["*no kernel 'drop_a_token' in */kernels.py; did you mean 'drops_a_token'[?]*"])
    assert "Traceback" not in result.stdout.str()


def test_bundled_kernels_are_tested_only_where_that_is_wanted(project: pytest.Pytester) -> None:
    """The tests of every project would test kernels of attnfuzz, and fail with them."""
    project.makepyprojecttoml(PROJECT.replace('on = ["*"]\n', ""))
    save(project, "saved/open.json", regression(9))
    result = project.runpytest_subprocess("--collect-only", "-q")
    assert [line for line in result.outlines if "::" in line] == [f"saved/open.json::{TARGET}"]


def test_only_regression_files_in_the_folder_are_collected(project: pytest.Pytester) -> None:
    """Other JSON files of a project would be taken for regressions."""
    save(project, "elsewhere.json", regression(9))
    project.mkdir("saved/deeper")
    save(project, "saved/deeper/below.json", regression(9))
    save(project, "saved/other.json", '{"format": "something else"}')
    result = project.runpytest_subprocess("--collect-only", "-q")
    result.stdout.fnmatch_lines(["no tests collected*"])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"format": "attnfuzz.regression/1", "problem": ', "*bad.json is not complete JSON (*"),
        ('{"format": "attnfuzz.regression/7"}', "*written by a newer attnfuzz; upgrade attnfuzz to read it"),
        (regression(9, kernel="gone.py:gone"), "*there is no file 'gone.py' here or above*"),
        (regression(9, kernel="dense_*"), '*"dense_[*]" may stand for several kernels*name that one'),
    ],
    ids=["truncated", "newer", "no kernel file", "glob"],
)
@pytest.mark.by_day("truncated")
def test_invalid_file_is_one_sentence(project: pytest.Pytester, content: Regression | str, sentence: str) -> None:
    """A damaged file would end in a traceback, or worse, be passed over."""
    save(project, "saved/bad.json", content)
    result = project.runpytest_subprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([sentence])
    assert "Traceback" not in result.stdout.str()


def test_a_machine_that_cannot_run_kernels_is_one_sentence(project: pytest.Pytester) -> None:
    """A page of traceback from inside attnfuzz says nothing of what to do about the machine."""
    save(project, "saved/open.json", regression(9))
    project.makeconftest("from attnfuzz.isolation import process\nprocess.resident_bytes = lambda pid: None\n")
    result = project.runpytest_subprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["/proc is not mounted here, *; mount it: mount -t proc proc /proc"])
    assert "Traceback" not in result.stdout.str()


@pytest.mark.night
def test_no_file_is_read_whole_to_see_what_it_is(project: pytest.Pytester) -> None:
    """A sparse file of a terabyte would fill the memory before the first test, and a named pipe be waited for."""
    for name, start in (("other", "{"), ("huge", '{"format": "attnfuzz.regression/1"')):
        save(project, f"saved/{name}.json", start)
        os.truncate(project.path / f"saved/{name}.json", 1 << 40)
    os.mkfifo(project.path / "saved/pipe.json")
    save(project, "saved/good.json", regression(8, status="fixed"))
    result = project.runpytest_subprocess("--collect-only", "-q")
    result.stdout.fnmatch_lines(
        ["*huge.json cannot be read (larger than 1048576 bytes)*", "*3 tests collected, 1 error*"]
    )
    assert "other.json" not in result.stdout.str()


def test_settings_of_any_size_are_refused_or_ignored(project: pytest.Pytester) -> None:
    """As above, for a file that every run of pytest looks at."""
    os.truncate(project.path / "pyproject.toml", 2 << 20)
    result = project.runpytest_subprocess("-c", os.devnull, "--rootdir", str(project.path))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*pyproject.toml cannot be read (larger than 1048576 bytes); repair it"])


@pytest.mark.night
def test_fuzz_in_a_parallel_run(project: pytest.Pytester) -> None:
    """A test made by @attnfuzz.fuzz would not be found by pytest, or not run in a worker."""
    project.makepyfile(
        """
        import attnfuzz
        from kernels import drops_a_token

        @attnfuzz.fuzz(drops_a_token, max_examples=50)
        def test_kernel():
            pass

        @attnfuzz.fuzz("dense_eager", max_examples=5)
        def test_bundled(case):
            assert case.problem == "dense_decode"
        """
    )
    result = project.runpytest_subprocess("-n", "2")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*KernelFailure: kernels.py:drops_a_token fails accuracy*", '*"seq_lens":[[]9[]]*'])


def test_plugin_loads_no_framework(project: pytest.Pytester) -> None:
    """Every pytest run of a project that has attnfuzz installed would pay for it."""
    script = "import attnfuzz.pytest_plugin, sys; print([name for name in sys.modules if name.startswith('attnfuzz.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "['attnfuzz.pytest_plugin']"


@pytest.mark.night
def test_a_tolerance_of_the_project_holds_for_its_regressions(project: pytest.Pytester) -> None:
    """Whoever must match another suite would see its regressions judged by bounds that are not meant."""
    loose = PROJECT + "\n[tool.attnfuzz.profiles.loose]\ntolerance = { atol = 1e9, rtol = 0 }\ndevice = 'cpu'\n"
    project.makepyprojecttoml(loose)
    save(project, "saved/open.json", regression(9))
    project.runpytest_subprocess().assert_outcomes(passed=2, xfailed=1)
    result = project.runpytest_subprocess("--attnfuzz-profile", "loose")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), '*pyproject.toml: [[]tool.attnfuzz] regresions = "saved" is no setting of attnfuzz; did you mean *'),
        (("--attnfuzz-profile", "ci"), "*pyproject.toml: [[]tool.attnfuzz] regresions = *"),
    ],
)
@pytest.mark.by_day("arguments0*")
def test_settings_that_are_not_valid_are_one_sentence(
    project: pytest.Pytester, arguments: tuple[str, ...], sentence: str
) -> None:
    """Misspelt, the folder would not be found, and no regression would ever run again."""
    project.makepyprojecttoml(PROJECT.replace("regressions", "regresions"))
    result = project.runpytest_subprocess(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {sentence}"])
    assert "Traceback" not in result.stderr.str()


def test_a_project_that_only_depends_on_attnfuzz_is_left_alone(project: pytest.Pytester) -> None:
    """The plugin is active in every project of an environment, configured or not."""
    project.makepyprojecttoml("[project]\nname = 'x'\nversion = '1'\ndependencies = ['attnfuzz']\n")
    project.makepyfile("def test_it(): pass")
    project.runpytest_subprocess().assert_outcomes(passed=1)


@pytest.mark.parametrize(("imports", "is_repaired"), [("from attnfuzz import assert_close", True), ("", False)])
def test_the_interpreter_is_repaired_for_tests_that_use_attnfuzz_and_for_no_others(
    imports: str, is_repaired: bool, project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right kernel in bfloat16 would be called wrong, or the tests of a project that has no use for it be changed."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    project.makepyfile(
        f"""
        {imports}
        import torch, triton
        import triton.language as tl

        @triton.jit
        def product(x, y, out):
            i, j = tl.arange(0, 16)[:, None] * 16, tl.arange(0, 16)[None, :]
            tl.store(out + i + j, tl.dot(tl.load(x + i + j), tl.load(y + i + j)))

        def test_product():
            x, y = torch.eye(16, dtype=torch.bfloat16), torch.full((16, 16), 3.0, dtype=torch.bfloat16)
            out = torch.zeros(16, 16)
            product[(1,)](x, y, out)
            assert out.equal(y.float())
        """
    )
    result = project.runpytest_subprocess()
    result.assert_outcomes(passed=int(is_repaired), failed=int(not is_repaired))


def test_device_option_is_documented(project: pytest.Pytester) -> None:
    """A GPU machine could not be told to use the CPU."""
    parser = pytest.Parser(_ispytest=True)
    pytest_addoption(parser)
    assert parser.parse_known_args(["--attnfuzz-device=cpu"]).attnfuzz_device == "cpu"
