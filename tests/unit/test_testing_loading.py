"""How another process finds a kernel: attnfuzz.testing.loading."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from attnfuzz.declaration import Kernel, KernelLoadError, load_kernels
from attnfuzz.testing.loading import declaration_of, load_here, target_of

FILE = """
import attnfuzz
{imports}

@attnfuzz.kernel("dense_decode", name="declared_name")
def original(inputs): ...

alias = original
"""


def imported_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch, *, imports: str) -> Kernel:
    """The kernel of a module in a package, imported as a test would."""
    package = folder / f"package_of_{folder.name}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "shared.py").touch()
    (package / "decode.py").write_text(FILE.format(imports=imports), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    kernel: Kernel = importlib.import_module(f"{package.name}.decode").original
    return kernel


def test_kernel_is_loaded_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose declared name is not its function's would not be found again."""
    kernel = imported_kernel(tmp_path, monkeypatch, imports="import math")
    target = target_of(kernel)
    assert target.endswith("decode.py:original")
    assert load_kernels(target)[0].declaration.name == "declared_name"


def test_relative_imports_need_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that imports its neighbours relative to its package cannot be loaded as a file."""
    kernel = imported_kernel(tmp_path, monkeypatch, imports="from . import shared")
    assert target_of(kernel) == f"package_of_{tmp_path.name}.decode:original"
    assert load_here(target_of(kernel)).declaration.name == "declared_name"


def test_bundled_kernel_goes_by_its_name() -> None:
    """A regression saved for a bundled kernel would hold a path of one machine."""
    from attnfuzz.kernels.bundled import dense_eager

    assert target_of(dense_eager) == "dense_eager"
    assert declaration_of(dense_eager, device="cpu", isolated=True).target == "dense_eager"


def test_a_missing_triton_is_told_with_its_remedy(tmp_path: Path) -> None:
    """A torch for the CPU brings none, and "No module named 'triton'" does not say which of its packages is meant."""
    file = tmp_path / "needs_triton.py"
    file.write_text("raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')", encoding="utf-8")
    with pytest.raises(KernelLoadError, match=r"No module named 'triton' .*; pip install 'attnfuzz\[interpreter\]'"):
        load_kernels(str(file))


def test_a_missing_module_is_told_with_its_remedy(tmp_path: Path) -> None:
    """A CI that has installed attnfuzz, and not the project, would say which import failed and not what is missing."""
    file = tmp_path / "needs_its_project.py"
    file.write_text("import a_project_that_is_not_installed", encoding="utf-8")
    with pytest.raises(KernelLoadError, match=r"'a_project_that_is_not_installed' .*pip install -e \. .*PYTHONPATH"):
        load_kernels(str(file))


@pytest.mark.parametrize("target", ["", ":"])
def test_a_name_of_nothing_is_no_name_of_every_kernel(target: str) -> None:
    """An empty variable of a CI script would have all bundled kernels searched, and the user's own never."""
    with pytest.raises(KernelLoadError, match="names no kernel"):
        load_kernels(target)


def test_a_kernel_in_a_folder_that_is_not_utf8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be told as an error of attnfuzz: nothing that is saved or sent could name the kernel."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    (folder / "mine.py").write_text("")
    monkeypatch.chdir(folder)
    with pytest.raises(
        KernelLoadError, match=r"^kernel file 'mine.py' lies in .*, which is not UTF-8; rename the folder"
    ):
        load_kernels("mine.py")
