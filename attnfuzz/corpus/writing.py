"""Writing regression files: a stable name, and never a half-written file."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import time
from pathlib import Path

from attnfuzz.adapters import module_of
from attnfuzz.corpus.regression import Regression, encode_regression
from attnfuzz.declaration import parts_of
from attnfuzz.problems.cases import encode_case

__all__ = ["regression_name", "remove_leftovers", "write_atomically", "write_regression"]

_LEFTOVER_S = 60.0
_LONGEST_KERNEL = 80
"""Bytes of a kernel's name in that of a file, which has 255 bytes at most."""
_NO_FILES_WITHOUT_NAME = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
"""What open(2) with O_TMPFILE says of a file system or a kernel that has no such thing."""


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


def write_regression(regression: Regression, folder: Path) -> Path:
    """Write the regression under its own name into ``folder``, made if need be, and return the path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / regression_name(regression)
    write_atomically(path, encode_regression(regression))
    return path


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace ``path`` by a file that holds ``data``: a reader sees the old file or the new one. Raises OSError.

    That holds also if this process is killed or the machine goes down: the data is on the disk before it has a name.
    ``private``: only this user may read it.
    """
    mode = 0o600 if private else 0o666
    file = _write_without_name(path.parent, data, mode)
    if file is None or not _name(file, path):
        _write_under_temporary_name(path, data, mode)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of writers that were killed; those of a writer at work are younger than a minute."""
    for path in folder.glob(".*.json.*.tmp"):
        with contextlib.suppress(OSError):  # gone meanwhile, or a folder that cannot be written
            if time.time() - path.stat().st_mtime > _LEFTOVER_S:
                path.unlink()


def _write_without_name(folder: Path, data: bytes, mode: int) -> int | None:
    """A descriptor of a file that vanishes unless it is given a name; None on file systems that cannot do that."""
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_WRONLY, mode)
    except OSError as error:
        if error.errno in _NO_FILES_WITHOUT_NAME:
            return None
        raise
    try:
        _write_all(file, data)
    except BaseException:
        os.close(file)
        raise
    return file


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
    os.fsync(file)


def _name(file: int, path: Path) -> bool:
    """Give an open file its name and close it; whether that worked. An old file can only be replaced by a named one."""
    source = f"/proc/self/fd/{file}"  # as open(2) describes it for O_TMPFILE
    folder = None
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)  # with a descriptor, os.link follows the source
        try:
            os.link(source, path.name, dst_dir_fd=folder)
        except FileExistsError:
            temporary = _temporary_name(path)
            os.link(source, temporary, dst_dir_fd=folder)
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:  # no /proc, no links on this file system: the other way tells what is wrong, if anything is
        return False
    finally:
        os.close(file)
        if folder is not None:
            os.close(folder)
    return True


def _temporary_name(path: Path) -> str:
    return f".{path.name}.{secrets.token_hex(4)}.tmp"


def _write_under_temporary_name(path: Path, data: bytes, mode: int) -> None:
    temporary = path.with_name(_temporary_name(path))
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            _write_all(file, data)
        finally:
            os.close(file)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the folder may be what failed; the first error is the one to raise
            temporary.unlink()
        raise
