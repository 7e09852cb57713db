"""What is imported once more for a fresh copy of a kernel, and what is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnfuzz
from attnfuzz.declaration import load_kernels
from attnfuzz.oracles.relations.fresh_copy import fresh_copy

KERNEL = """
import attnfuzz
import attnfuzz.kernels.eager as eager
import fresh_copy_helper
import fresh_copy_installed


@attnfuzz.kernel("dense_decode")
def k(inputs):
    return fresh_copy_helper, fresh_copy_installed, attnfuzz, eager
"""


@pytest.fixture(autouse=True)
def _imported_by_this_test_alone() -> Iterator[None]:
    yield
    for name in ("fresh_copy_helper", "fresh_copy_installed"):
        sys.modules.pop(name, None)


def test_an_environment_beside_the_kernel_is_not_imported_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would be loaded once more, and the process die: in a repository with .venv in it, as after `make`."""
    site = tmp_path / ".venv" / "lib" / "python3" / "site-packages"
    site.mkdir(parents=True)
    (site / "fresh_copy_installed.py").write_text("")
    (tmp_path / "fresh_copy_helper.py").write_text("")
    (tmp_path / "mine.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(site))
    (kernel,) = load_kernels(f"{tmp_path / 'mine.py'}:k")
    copy = fresh_copy(kernel)
    assert copy is not None
    helper, installed, framework, _ = kernel.function(None)
    helper_of_copy, installed_of_copy, framework_of_copy, _ = copy.function(None)
    assert helper_of_copy is not helper
    assert sys.modules["fresh_copy_helper"] is helper
    assert installed_of_copy is installed
    assert framework_of_copy is framework is attnfuzz


def test_attnfuzz_is_not_imported_twice_from_its_own_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of somebody who tries it in the repository's folder would be judged by another attnfuzz."""
    root = Path(attnfuzz.__file__).resolve().parents[1]
    module = sys.modules["attnfuzz.oracles.relations.fresh_copy"]
    (tmp_path / "fresh_copy_helper.py").write_text("")
    (tmp_path / "fresh_copy_installed.py").write_text("")
    (tmp_path / "mine.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    (kernel,) = load_kernels(f"{tmp_path / 'mine.py'}:k")
    monkeypatch.setattr(sys.modules[kernel.function.__module__], "__file__", str(root / "mine.py"))
    copy = fresh_copy(kernel)
    assert copy is not None
    *_, framework, eager = copy.function(None)
    assert framework is attnfuzz
    assert eager is not kernel.function(None)[-1]
    assert sys.modules["attnfuzz.oracles.relations.fresh_copy"] is module


def test_a_fresh_copy_needs_no_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with a relative path, as torch.ops, would be looked for in a folder that may have been removed."""
    (tmp_path / "fresh_copy_helper.py").write_text("")
    (tmp_path / "fresh_copy_installed.py").write_text("")
    (tmp_path / "mine.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    (kernel,) = load_kernels(f"{tmp_path / 'mine.py'}:k")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert fresh_copy(kernel) is not None


def test_a_copy_is_had_of_a_relative_target_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel remembers could not be told once it has changed the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import attnfuzz\n\n@attnfuzz.kernel('dense_decode')\ndef k(i): ...\n")
    (kernel,) = load_kernels("mine.py:k")
    monkeypatch.chdir("/")
    copy = fresh_copy(kernel)
    assert copy is not None
    assert copy.function is not kernel.function
