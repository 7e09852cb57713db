"""Writing regression files, each under a stable name."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from attnfuzz.adapters import module_of
from attnfuzz.corpus.regression import Regression, encode_regression
from attnfuzz.declaration import parts_of
from attnfuzz.own_files import OwnFolder
from attnfuzz.problems.cases import encode_case

_LONGEST_KERNEL = 80
"""Bytes of a kernel's name in that of a file, which has 255 bytes at most."""


def regression_name(regression: Regression) -> str:
    """``<problem>-<kernel>-<oracle>-<hash8>.json``; the hash is that of the kernel's target and of the cases."""
    names = map(_short_name, parts_of(regression.kernel) or (regression.kernel,))
    kernel = re.sub(r"\W+", "_", "+".join(names))
    kernel = kernel.encode()[:_LONGEST_KERNEL].decode(errors="ignore")
    cases = b"".join(encode_case(case) for case in (regression.case, *regression.preceding))
    digest = hashlib.sha256(regression.kernel.encode() + b"\0" + cases).hexdigest()[:8]
    return f"{regression.problem}-{kernel}-{regression.finding.oracle}-{digest}.json"


def _short_name(target: str) -> str:
    """Without the path to its file, or the module."""
    place, _, name = target.rpartition(":")
    return name if module_of(place) == place else f"{place}_{name}"


def write_regression(regression: Regression, folder: Path, *, below: Path | None = None) -> Path:
    """Write the regression under its own name into ``folder``, made if need be, and return the path. Raises OSError.

    ``below``: the part of the folder's name in which links are followed, all of it if None; see `OwnFolder`.
    """
    place = OwnFolder(folder, below=below)
    place.make()
    return place.write(regression_name(regression), encode_regression(regression))
