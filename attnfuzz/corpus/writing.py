"""Writing regression files: a stable name, and never a half-written file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from pathlib import Path

from attnfuzz.corpus.regression import Regression, encode_regression
from attnfuzz.problems.cases import encode_case

__all__ = ["regression_name", "write_atomically", "write_regression"]


def regression_name(regression: Regression) -> str:
    """``<problem>-<kernel>-<oracle>-<hash8>.json``; the hash is that of the kernel's target and of the cases."""
    kernel = re.sub(r"\W+", "_", regression.kernel.rpartition(":")[2])
    cases = b"".join(encode_case(case) for case in (regression.case, *regression.preceding))
    digest = hashlib.sha256(regression.kernel.encode() + b"\0" + cases).hexdigest()[:8]
    return f"{regression.problem}-{kernel}-{regression.finding.oracle}-{digest}.json"


def write_regression(regression: Regression, folder: Path) -> Path:
    """Write the regression under its own name into ``folder``, made if need be, and return the path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / regression_name(regression)
    write_atomically(path, encode_regression(regression))
    return path


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by a file that holds ``data``: a reader sees the old file or the new one. Raises OSError."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o666 & ~_umask())
        os.replace(temporary, path)  # noqa: PTH105 - the same call, on what mkstemp returned
    except BaseException:
        with contextlib.suppress(OSError):  # the folder may be what failed; the first error is the one to raise
            Path(temporary).unlink()
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
