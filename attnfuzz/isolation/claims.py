"""Folders that belong to a live process: told apart from what a killed one left behind. Torch-free."""

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
import weakref
from pathlib import Path

from attnfuzz.own_files import OwnFolder

_PREFIX = "attnfuzz-run-"
_LEFTOVER = re.compile(_PREFIX + "[a-z0-9_]{8}")
"""As `tempfile.mkdtemp` calls a folder."""
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
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
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
        _remove_leftovers(Path(tempfile.gettempdir()) if parent is None else parent)
        folder = OwnFolder.temporary(_PREFIX, parent)
        self.path = folder.path
        self.remove = weakref.finalize(self, _remove, folder, Claim(self.path))


def _remove(folder: OwnFolder, claim: Claim) -> None:
    folder.remove_all()
    claim.release()


def _remove_leftovers(parent: Path) -> None:
    """Remove what killed processes of this user left: by name, permissions, age, and that no process claims it."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            state = folder.lstat()
        except OSError:  # gone meanwhile
            continue
        is_private = state.st_mode == stat.S_IFDIR | stat.S_IRWXU and state.st_uid == os.getuid()
        is_ours = is_private and _LEFTOVER.fullmatch(folder.name) is not None
        if is_ours and time.time() - state.st_mtime > _LEFTOVER_S and not is_claimed(folder):
            shutil.rmtree(folder, ignore_errors=True)
