"""attnfuzz.isolation.pythons: other environments that executors run in, and what is told of those that they cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attnfuzz import safe_start
from attnfuzz.environment import NEEDED, all_installed
from attnfuzz.isolation.pythons import PythonError, examine, examine_all
from attnfuzz.judging.runner import Runner
from tests.common.environment_stand_ins import make_environment


def a_program(folder: Path, script: str) -> Path:
    program = folder / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_an_environment_tells_its_own_versions(tmp_path: Path) -> None:
    """What differs between two environments would be told by the packages of the driver, or by those they share."""
    folder = make_environment(tmp_path / "env", triton="3.9.0", Some_Engine="1.2")
    python = examine(folder)
    assert python == examine(folder / "bin" / "python")
    assert python.path == folder / "bin" / "python"
    assert python.versions["triton"] == "3.9.0"
    assert python.versions["some-engine"] == "1.2"
    assert python.versions["torch"] == all_installed()["torch"]


@pytest.mark.night
def test_executors_run_there(tmp_path: Path) -> None:
    """Kernels would go on running in the driver's environment, under the name of another."""
    folder = make_environment(tmp_path / "env", triton="3.9.0")
    with Runner(device="cpu", python=examine(folder).path) as runner:
        assert runner.environment.versions["triton"] == "3.9.0"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 0", "does not answer as a Python does (it ended with status 0)"),
        ("echo '{\"missing\": 3}'", "does not answer as a Python does"),
        ("echo no such thing >&2; exit 7", "(it ended with status 7 and said 'no such thing')"),
        ("echo 'Unknown option: -P' >&2; exit 2", "a Python older than 3.11"),
        ("sleep 1000 & wait", "did not answer within 0.5 s"),
        ("exec yes", "does not answer as a Python does"),
    ],
)
def test_what_is_no_python_is_told(script: str, words: str, tmp_path: Path) -> None:
    """A wrong path would show as a traceback, or be waited for without end."""
    with pytest.raises(PythonError) as raised:
        examine(a_program(tmp_path, script), timeout_s=0.5 if "sleep" in script else 60.0)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_is_no_program_is_told(tmp_path: Path) -> None:
    """A folder or a file in its place would be tried to run."""
    (tmp_path / "file").write_text("no program")
    for name, words in (("none", "does not exist"), ("", "without bin/python"), ("file", "cannot be run")):
        with pytest.raises(PythonError, match=words):
            examine(tmp_path / name)


def test_what_an_environment_lacks_is_told_with_the_remedy(tmp_path: Path) -> None:
    """Executors would die there, one after the other, of an import that nobody has heard of."""
    folder = make_environment(tmp_path / "env", has_packages=False)
    with pytest.raises(PythonError, match=r"has no torch, numpy, msgspec and jaxtyping.* -m pip install torch numpy"):
        examine(folder)


def test_an_environment_named_twice_is_refused(tmp_path: Path) -> None:
    """It would be compared with itself, and found to be alike."""
    folder = make_environment(tmp_path / "env")
    with pytest.raises(PythonError, match="named twice"):
        examine_all([folder, folder / "bin" / "python"])


def test_all_that_executors_import_is_asked_for() -> None:
    """An environment would be let through in which no executor can start."""
    script = (
        "import sys, numpy, torch, triton; before = set(sys.modules);"
        "import attnfuzz.judging.service, attnfuzz.isolation.zygote;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert set(run.stdout.split()) - {"attnfuzz", "triton"} <= set(NEEDED)


def test_another_environment_does_not_see_what_attnfuzz_is_installed_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it lacks would be taken from the driver's environment, of another version and for another Python."""
    monkeypatch.setattr(safe_start, "_ROOT", str(tmp_path))
    monkeypatch.setattr(sys, "path", ["/theirs"])
    safe_start.put_path_in_order(elsewhere=True)
    assert str(tmp_path) not in sys.path
    safe_start.put_path_in_order()
    assert sys.path[-1] == str(tmp_path)
