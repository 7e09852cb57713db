"""Where regression files lie: the configured folder, and the files that paths on a command line stand for."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

from attnfuzz.corpus.reading import RegressionError

__all__ = ["DEFAULT_FOLDER", "configured_folder", "regression_files"]

DEFAULT_FOLDER = "regressions"


def configured_folder(start: Path | None = None) -> Path:
    """The folder named by ``[tool.attnfuzz] regressions`` in the nearest pyproject.toml, else ``regressions`` here.

    A relative name is relative to the pyproject.toml. Raises RegressionError for a pyproject.toml that cannot be read.
    """
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        pyproject = folder / "pyproject.toml"
        if pyproject.is_file():
            name = _folder_name(pyproject)
            return _shorten(folder / name) if name else Path(DEFAULT_FOLDER)
    return Path(DEFAULT_FOLDER)


def regression_files(paths: Iterable[Path]) -> list[Path]:
    """Every file among ``paths`` and every ``*.json`` in a folder among them, sorted by name within a folder.

    Raises RegressionError for a path that does not exist.
    """
    files: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            files.update(dict.fromkeys(sorted(path.glob("*.json"))))
        elif path.exists():
            files[path] = None
        else:
            raise RegressionError(f"{path} does not exist; give a regression file or a folder of them")
    return list(files)


def _folder_name(pyproject: Path) -> str | None:
    try:
        table = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RegressionError(f"{pyproject} cannot be read ({error}); repair it or name the regressions") from error
    name = table.get("tool", {}).get("attnfuzz", {}).get("regressions")
    if name is not None and (not isinstance(name, str) or not name):
        raise RegressionError(f"{pyproject}: [tool.attnfuzz] regressions={name!r} must be the name of a folder")
    return name


def _shorten(path: Path) -> Path:
    """Relative to the working directory where that is shorter to read."""
    cwd = Path.cwd()
    return path.relative_to(cwd) if path.is_relative_to(cwd) else path
