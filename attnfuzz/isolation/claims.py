"""Folders that belong to a live process: told apart from what a killed one left behind. Torch-free."""

import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

__all__ = ["Claim", "PrivateFolder", "is_claimed"]

_PREFIX = "attnfuzz-run-"
_LEFTOVER_S = 60.0
"""A folder younger than this may belong to a process that has not claimed it yet."""


class Claim:
    """Shows that a folder is in use, until it is released or this process ends, however it does.

    An advisory lock rather than a process ID in the name: those are used again, and mean nothing in another container.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # a file system without locks: then nobody can tell
            self.release()

    def release(self) -> None:
        """Give the folder up; may be called again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_claimed(folder: Path) -> bool:
    """Whether a live process has claimed ``folder``; True where that cannot be known."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


class PrivateFolder:
    """A new folder for temporary files that only this user may enter, at ``path`` until ``remove`` or its owner's end.

    If this process is killed, the next to make one removes it. ``parent`` is the system's temporary folder if None.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        _remove_leftovers(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self.remove = weakref.finalize(self, _remove, self.path, Claim(self.path))


def _remove(folder: Path, claim: Claim) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    claim.release()


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            state = folder.lstat()
        except OSError:  # gone meanwhile
            continue
        is_old = time.time() - state.st_mtime > _LEFTOVER_S
        if is_old and state.st_uid == os.getuid() and not is_claimed(folder):
            shutil.rmtree(folder, ignore_errors=True)
