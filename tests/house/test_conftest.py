"""tests/conftest.py: what is tested is what lies beside the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attnfuzz
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def test_another_attnfuzz_than_the_one_beside_the_tests_is_refused(tmp_path: Path) -> None:
    """Changes to a clone would seem to pass its tests, which import what is installed from elsewhere."""
    clone = tmp_path.resolve() / "clone"
    (clone / "tests").mkdir(parents=True)
    (clone / "attnfuzz").mkdir()
    shutil.copy(CONFTEST, clone / "tests")
    (clone / "tests" / "test_any.py").write_text("def test_any(): ...\n")
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=120, check=False)
    installed = Path(attnfuzz.__file__).resolve().parent
    assert done.returncode == 4, done.stdout
    assert done.stderr.strip() == (
        f"ERROR: these tests are of {clone / 'attnfuzz'}, but `import attnfuzz` finds {installed}; "
        f"set PYTHONPATH={clone}, or install that one: pip install -e {clone}"
    )


PARAMETERS = """
import pytest

@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("word", ["one", "two"])
@pytest.mark.by_day({patterns})
def test_any(word, number): ...
"""


def test_parameters_that_are_not_for_the_day_run_at_night(tmp_path: Path) -> None:
    """A change would wait for them, or a name that is mistyped take them out of the day unnoticed."""
    for name, patterns in (("some", '"one-*", "two-2"'), ("each", ""), ("mistyped", '"three-*"')):
        (tmp_path / f"test_{name}.py").write_text(PARAMETERS.format(patterns=patterns))
    root = CONFTEST.parents[1]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", "not night"]
    command += ["-c", str(root / "pyproject.toml"), "--confcutdir", str(root), "-p", "tests.conftest", str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    listed = [line.partition("::")[2] for line in done.stdout.splitlines() if "test_some.py::" in line]
    assert listed == [f"test_any[{one}]" for one in ("one-1", "one-2", "two-2")], done.stdout + done.stderr
    assert "5/8 tests collected (3 deselected), 1 error" in done.stdout
    assert "by_day of test_any: ['three-*'] fit" in done.stdout


TELLS_ITS_PATH = """
import os

import attnfuzz


@attnfuzz.kernel("dense_decode")
def telling(inputs):
    raise ValueError("programs are looked for in " + os.environ["PATH"].partition(":")[0])
"""


def test_a_runner_finds_programs_where_its_test_has_put_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test with a stand-in for a program would import torch once more, or its kernels would not find it."""
    (tmp_path / "telling.py").write_text(TELLS_ITS_PATH)
    with Runner(device="cpu") as usual:
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        with Runner(device="cpu") as one:
            assert one.zygote is usual.zygote
            (declaration,) = one.declarations([str(tmp_path / "telling.py")])
            failure = one.judge(declaration, simplest_case("dense_decode", Supports(), {})).failure
    assert failure is not None
    assert f"programs are looked for in {tmp_path}" in failure.message
