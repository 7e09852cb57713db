"""Changed copies of source files are loaded in place of the originals: here, in executors and under pytest."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnfuzz.declaration import load_kernels
from attnfuzz.judging.runner import Runner
from attnfuzz.overlay import VARIABLE, OverlayError, install_overlay, original_of, write_overlay

KERNEL = """
import attnfuzz
from overlaid_helper import NAME

@attnfuzz.kernel("merge_states", name=NAME)
def kernel(inputs):
    return None
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A kernel file and its neighbour, and an overlay of the neighbour that is in force."""
    (tmp_path / "overlaid_kernel.py").write_text(KERNEL)
    (tmp_path / "overlaid_helper.py").write_text("NAME = 'original'\n\ndef where():\n    return 'original'\n")
    (tmp_path / "copies").mkdir()
    copy = tmp_path / "copies" / "changed.py"
    copy.write_text("NAME = 'changed'\n\ndef where():\n    return 'changed'\n")
    write_overlay(tmp_path / "o.json", {tmp_path / "overlaid_helper.py": copy}, loaded=tmp_path / "loaded")
    before = set(sys.modules)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "o.json"))
    monkeypatch.syspath_prepend(str(tmp_path))
    install_overlay()
    yield tmp_path
    monkeypatch.delenv(VARIABLE, raising=False)
    install_overlay()
    for name in set(sys.modules) - before:
        if name.startswith(("overlaid_", "attnfuzz_user_")):
            del sys.modules[name]


def test_the_copy_runs_under_the_name_of_the_original(project: Path) -> None:
    """Triton would compile the original's source, or the module would not find the files beside it."""
    module = importlib.import_module("overlaid_helper")
    assert module.NAME == "changed"
    assert module.__file__ == str(project / "overlaid_helper.py")
    assert module.where.__code__.co_filename == str(project / "copies" / "changed.py")
    assert "'changed'" in inspect.getsource(module.where)
    assert (project / "loaded").read_text().splitlines() == [str(project / "overlaid_helper.py")]


def test_a_kernel_file_given_by_path_is_replaced_too(project: Path) -> None:
    """A mutant of the file on the command line itself would never run."""
    file = project / "overlaid_kernel.py"
    copy = project / "copies" / "kernel.py"
    copy.write_text(KERNEL.replace("name=NAME", "name='mutant'"))
    write_overlay(project / "o.json", {file: copy})
    install_overlay()
    (kernel,) = load_kernels(str(file))
    assert kernel.declaration.name == "mutant"
    assert original_of(kernel.function.__code__.co_filename) == str(file)


def test_executors_load_the_copy(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants would be judged as if nothing had been changed."""
    overlay = str(project / "o.json")
    monkeypatch.delenv(VARIABLE)
    with Runner(device="cpu") as plain, Runner(environment={VARIABLE: overlay}, zygote=plain.zygote) as mutated:
        names = [one.declarations([str(project / "overlaid_kernel.py")])[0].name for one in (plain, mutated)]
    assert names == ["original", "changed"]


def test_a_pytest_run_loads_the_copy(project: Path) -> None:
    """A user's own tests could not be the killer."""
    (project / "test_it.py").write_text(
        "import overlaid_helper\ndef test(): assert overlaid_helper.NAME == 'changed'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(project), "test_it.py"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


def test_no_overlay_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken overlay would end in a traceback, or be ignored and every mutant survive."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "missing.json"))
    with pytest.raises(OverlayError, match=r"missing\.json' is not an overlay .* unset it"):
        install_overlay()
