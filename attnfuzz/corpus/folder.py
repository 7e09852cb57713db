"""Where regression files lie, unless a folder is configured, and the files that paths on a command line stand for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attnfuzz.corpus.reading import RegressionError

__all__ = ["DEFAULT_FOLDER", "regression_files"]

DEFAULT_FOLDER = "regressions"


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
