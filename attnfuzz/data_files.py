"""Opening the files that a user or somebody else names: only regular ones, never more of them than was bargained for.

A named pipe would make the reader wait for ever, a device may have no end, and the size of a file is checked before any
of it is read. Every trouble is an OSError whose ``strerror`` finishes the sentence "it cannot be read (...)", also that
of a name that no file can have. Imports nothing heavy.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

MOST_RESULT_BYTES = 32 << 20
"""Largest file of results that attnfuzz wrote; the largest known ones have a few megabytes."""
MOST_PYPROJECT_BYTES = 1 << 20

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def read_data_file(path: Path, limit: int) -> bytes:
    """All of a regular file of at most ``limit`` bytes; a link to one will do. Raises OSError."""
    too_large = OSError(errno.EFBIG, f"larger than {limit} bytes", os.fspath(path))
    with _open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise too_large
        data = file.read(limit + 1)  # the file may have grown, and those of /proc have a size of 0
    if len(data) > limit:
        raise too_large
    return data


def read_head(path: Path, nbytes: int) -> bytes:
    """The first ``nbytes`` of a regular file, or all of a smaller one. Raises OSError."""
    with _open_regular(path) as file:
        return file.read(nbytes)


def is_regular_file(path: Path) -> bool:
    """Whether a regular file lies there, or a link to one; also said of a name that no file can have."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):  # ValueError: a NUL, or characters without an encoding
        return False


def why_unusable(path: Path) -> str | None:
    """Why nothing can be read or written under this name, whatever lies there; None if something may be."""
    try:
        _check_name(path)
        with suppress(FileNotFoundError):  # it may be about to be written
            path.stat()
    except OSError as error:
        return error.strerror
    return None


def _open_regular(path: Path) -> BinaryIO:
    _check_name(path)
    # without O_NONBLOCK, opening a pipe that nobody writes to waits; it has no effect on regular files
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, f"it is {kind}, no file", os.fspath(path))
    return os.fdopen(descriptor, "rb")


def _check_name(path: Path) -> None:
    """Raise OSError for a name that could not be opened, or not be printed and saved as JSON."""
    text = str(path)
    if "\0" in text:
        raise FileNotFoundError(errno.ENOENT, "its name holds a NUL character", text)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OSError(errno.EILSEQ, "its name is not UTF-8", text) from None
