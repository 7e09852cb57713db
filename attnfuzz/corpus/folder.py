"""Where regression files lie, unless a folder is configured, what each is called, and what paths stand for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from attnfuzz.adapters import module_of
from attnfuzz.corpus.regression import Regression, encode_regression
from attnfuzz.data_files import why_unusable
from attnfuzz.declaration import parts_of
from attnfuzz.own_files import OwnFolder
from attnfuzz.problems.cases import encode_case

DEFAULT_FOLDER = "regressions"
_LONGEST_KERNEL = 80
"""Bytes of a kernel's name in that of a file, which has 255 bytes at most."""


def regression_name(regression: Regression) -> str:
    """``<problem>-<kernel>-<oracle>-<hash8>.json``; the hash is that of the kernel's target and of the cases."""
    names = []
    for target in parts_of(regression.kernel) or (regression.kernel,):  # without the path to its file, or the module
        place, _, name = target.rpartition(":")
        names.append(name if module_of(place) == place else f"{place}_{name}")
    kernel = re.sub(r"\W+", "_", "+".join(names))
    kernel = kernel.encode()[:_LONGEST_KERNEL].decode(errors="ignore")
    cases = b"".join(encode_case(case) for case in (regression.case, *regression.preceding))
    digest = hashlib.sha256(regression.kernel.encode() + b"\0" + cases).hexdigest()[:8]
    return f"{regression.problem}-{kernel}-{regression.finding.oracle}-{digest}.json"


def write_regression(regression: Regression, folder: Path, *, below: Path | None = None) -> Path:
    """Write the regression under its own name into ``folder``, made if need be, and return the path. Raises OSError.

    ``below``: the part of the folder's name in which links are followed, all of it if None; see `OwnFolder`.
    """
    place = OwnFolder(folder, below=below)
    place.make()
    return place.write(regression_name(regression), encode_regression(regression))


def regression_files(paths: Iterable[Path]) -> list[Path]:
    """Every ``*.json`` in a folder among ``paths``, sorted by name, and whatever else they name, be it there or not."""
    files: dict[Path, None] = {}
    for path in paths:
        is_folder = why_unusable(path) is None and path.is_dir()
        files.update(dict.fromkeys(sorted(path.glob("*.json")) if is_folder else [path]))
    return list(files)
