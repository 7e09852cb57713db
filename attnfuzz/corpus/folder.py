"""Where regression files lie, unless a folder is configured, and the files that paths on a command line stand for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attnfuzz.data_files import why_unusable

DEFAULT_FOLDER = "regressions"


def regression_files(paths: Iterable[Path]) -> list[Path]:
    """Every ``*.json`` in a folder among ``paths``, sorted by name, and whatever else they name, be it there or not."""
    files: dict[Path, None] = {}
    for path in paths:
        is_folder = why_unusable(path) is None and path.is_dir()
        files.update(dict.fromkeys(sorted(path.glob("*.json")) if is_folder else [path]))
    return list(files)
