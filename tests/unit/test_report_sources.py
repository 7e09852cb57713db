"""Finding a kernel's source text without importing it: attnfuzz.report.sources and shake."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnfuzz.report.sources import definition_of, kernel_sources, only_what_it_needs

MODULE = '''"""A docstring."""

from __future__ import annotations

import math
from os import path, sep

USED = 3
UNUSED = path


@staticmethod
def wanted(x: int) -> float:
    return math.sqrt(USED) + helper()


def helper() -> float:
    # a comment that stays
    return 1.0


def other() -> str:
    return sep


@declare(name="renamed")
def original() -> None: ...
'''


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_shaken_module_keeps_what_the_function_needs() -> None:
    """A script would be full of other kernels, or lack what its own one calls."""
    shaken = only_what_it_needs(MODULE, "wanted")
    compile(shaken, "shaken", "exec")
    for part in ("A docstring.", "import math", "USED = 3", "@staticmethod", "def helper", "# a comment that stays"):
        assert part in shaken
    for part in ("UNUSED", "other", "sep", "original"):
        assert part not in shaken


def test_definition_is_found_by_declared_name() -> None:
    """A kernel declared under another name than its function's would not be found."""
    assert definition_of(MODULE, "renamed") == "original"
    assert definition_of(MODULE, "helper") == "helper"
    with pytest.raises(LookupError, match="'missing'"):
        definition_of(MODULE, "missing")


def test_files_are_followed_but_not_imported(tmp_path: Path) -> None:
    """A neighbour would be missing from the script, or a kernel's module run in the driver."""
    files = {
        "kernels.py": "raise SystemExit\nimport tiles\nfrom deep.inner import thing\nimport torch, json",
        "tiles.py": "from deep import other",
        "deep/__init__.py": "",
        "deep/inner.py": "from .level import x\nfrom . import other",
        "deep/level.py": "x = 1",
        "deep/other.py": "",
    }
    write(tmp_path, files | {"unrelated.py": "", "deep/unrelated.py": ""})
    sources = kernel_sources(f"{tmp_path / 'kernels.py'}:my_kernel")
    assert (sources.entry, sources.attribute) == ("kernels.py", "my_kernel")
    assert sources.files == files


def test_module_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel in a package would not be found, or its relative imports be lost."""
    files = {"mine/__init__.py": "raise SystemExit", "mine/decode.py": "from .shared import x", "mine/shared.py": ""}
    write(tmp_path, files)
    monkeypatch.syspath_prepend(tmp_path)
    sources = kernel_sources("mine.decode:kernel")
    assert sources.entry == "mine/decode.py"
    assert sources.files == files


def test_bundled_kernel_brings_only_kernel_files() -> None:
    """The framework itself would be put into the script."""
    sources = kernel_sources("paged_naive")
    assert sources.entry == "attnfuzz/kernels/bundled.py"
    assert "attnfuzz/kernels/paged/paged_decode.py" in sources.files
    assert "attnfuzz/kernels/dense/dense_decode.py" not in sources.files
    assert all(name.startswith("attnfuzz/kernels/") for name in sources.files)
