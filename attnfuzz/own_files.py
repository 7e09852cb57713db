"""Writing, making and removing files: whatever attnfuzz does to a disk is done here.

A folder may have been handed on, by an archive or ``git clone``, and with it a symbolic link in place of any file or
folder that attnfuzz is about to write. So links are followed only as far as somebody typed the way: in the name of a
folder (`OwnFolder`, up to ``below``) or of a file (`write_file`). Anything beneath is opened without following any, and
one that lies there is a `LinkError`. Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from attnfuzz.project import project_root

_SEARCHED = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
"""How folders on the way are opened: with O_PATH that needs no permission to list them."""
_LEFTOVER_S = 60.0
_LEFTOVER = re.compile(r"\..+\.json\.[0-9a-f]{8}\.tmp")
_NO_FILES_WITHOUT_NAME = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
"""Errors of open(2) with O_TMPFILE on a file system or a kernel that has no such thing."""


class LinkError(OSError):
    """A symbolic link lies where attnfuzz writes; ``str`` of it is one sentence with a remedy."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.ELOOP, "it is a symbolic link", os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename!r} is a symbolic link, and attnfuzz writes through none that nobody typed; remove it"


class OwnFolder:
    """A folder that attnfuzz writes to. Links on the way to ``below`` are followed, and none from there on.

    ``below`` is the folder itself if None: whoever typed its name may have a link there. Nothing is made or looked at
    yet. Names are those of files in the folder. All methods raise OSError, `LinkError` among them.
    """

    def __init__(self, path: Path, *, below: Path | None = None) -> None:
        self.path = path
        self._below = path if below is None else below
        self._parts = path.relative_to(self._below).parts
        for part in self._parts:
            _check_name(part)
        self._is_new = False

    @classmethod
    def temporary(cls, prefix: str, parent: Path | None = None) -> OwnFolder:
        """A new one that only this user may enter, in the system's folder for such or ``parent``."""
        folder = cls(Path(tempfile.mkdtemp(prefix=prefix, dir=parent)))
        folder._is_new = True
        return folder

    def inner(self, *names: str) -> OwnFolder:
        """The folder of that name in this one; links to it are not followed."""
        return OwnFolder(self.path.joinpath(*names), below=self._below)

    def make(self) -> None:
        """Make it, and those around it, unless they are there."""
        self._below.mkdir(parents=True, exist_ok=True)
        with self._opened(making=True):
            pass

    def make_new(self, name: str) -> OwnFolder:
        """Make a folder in it. Raises FileExistsError if anything lies there."""
        _check_name(name)
        with self._opened() as folder:
            os.mkdir(name, dir_fd=folder)
        made = self.inner(name)
        made._is_new = True
        return made

    def names(self) -> list[str]:
        """Names of all that lies in it, sorted."""
        with self._opened() as folder:
            listed = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
            try:
                return sorted(os.listdir(listed))  # noqa: PTH208 - a descriptor
            finally:
                os.close(listed)

    def refuse_link(self, name: str) -> None:
        """Raise LinkError if a link lies under that name; nothing else is wrong with it."""
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            self._refuse_link(folder, name)

    def write(self, name: str, data: bytes, *, private: bool = False) -> Path:
        """Replace the file by one that holds ``data``, and return its path: a reader sees the old file or the new one.

        That holds also if this process is killed or the machine goes down: the data is on the disk before it has a
        name. ``private``: only this user may read it.
        """
        with self._opened() as folder:
            self._refuse_link(folder, name)
            _replace(folder, name, data, 0o600 if private else 0o666)
        return self.path / name

    def create(self, name: str) -> int:
        """A descriptor to write to a new file. Raises FileExistsError if anything lies there, be it a dangling link."""
        return self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def open_file(self, name: str) -> int:
        """A descriptor to read and write a regular file, which is made if need be."""
        descriptor = self._open(name, os.O_RDWR | os.O_CREAT)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is no file", os.fspath(self.path / name))
        return descriptor

    def remove(self, name: str) -> None:
        """Remove a file if it is there; of a link the link itself, which harms nothing that it points to."""
        _check_name(name)
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            os.unlink(name, dir_fd=folder)

    def remove_leftovers(self) -> None:
        """Remove temporary files of writers that were killed; those of a writer at work are younger than a minute."""
        with contextlib.suppress(OSError):  # gone meanwhile, or a folder that cannot be written
            for name in filter(_LEFTOVER.fullmatch, self.names()):
                state = (self.path / name).lstat()
                if stat.S_ISREG(state.st_mode) and time.time() - state.st_mtime > _LEFTOVER_S:
                    self.remove(name)

    def remove_empty(self) -> None:
        """Remove the folder itself. Raises OSError if anything lies in it."""
        if not self._parts:
            self.path.rmdir()
            return
        with OwnFolder(self.path.parent, below=self._below)._opened() as around:
            os.rmdir(self.path.name, dir_fd=around)

    def remove_all(self) -> None:
        """Remove a folder that this process has made with all that came to be in it, as far as that can be removed."""
        if not self._is_new:
            raise RuntimeError(f"{self.path} was not made by this process, so what lies in it may be anybody's")
        shutil.rmtree(self.path, ignore_errors=True)

    def _open(self, name: str, flags: int) -> int:
        _check_name(name)
        with self._opened() as folder:
            # without O_NONBLOCK, opening a pipe may wait for ever
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            try:
                return os.open(name, flags, 0o644, dir_fd=folder)
            except OSError:
                self._refuse_link(folder, name)
                raise

    @contextlib.contextmanager
    def _opened(self, *, making: bool = False) -> Iterator[int]:
        """A descriptor for the other functions of ``os``."""
        folder = os.open(self._below, _SEARCHED)
        try:
            for number, part in enumerate(self._parts, start=1):
                if making:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder)
                try:
                    inner = os.open(part, _SEARCHED | os.O_NOFOLLOW, dir_fd=folder)
                except OSError:
                    if _is_link(folder, part):
                        raise LinkError(self._below.joinpath(*self._parts[:number])) from None
                    raise
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    def _refuse_link(self, folder: int, name: str) -> None:
        _check_name(name)
        if _is_link(folder, name):
            raise LinkError(self.path / name)


def refuse_links(path: Path) -> None:
    """Raise LinkError for a link on the way to ``path`` that this project brought along.

    That is one below the working directory, or else below the root of the project; what lies around them is not looked
    at.
    """
    place = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow the links that are looked for
    for root in (Path.cwd(), project_root()):
        if place.is_relative_to(root):
            for part in (*reversed(place.parents), place):
                if part != root and part.is_relative_to(root) and part.is_symlink():
                    raise LinkError(path if part == place else part)
            return


def why_not_made(folder: Path) -> OSError | None:
    """The reason why ``folder`` and those around it cannot be made, which is tried; nothing is left of that."""
    made: list[Path] = []
    try:
        for part in (*reversed(folder.parents), folder):
            if not part.is_dir():
                part.mkdir()
                made.append(part)
    except OSError as error:
        return error
    finally:
        for part in reversed(made):
            with contextlib.suppress(OSError):  # somebody has put something there meanwhile
                part.rmdir()
    return None


def write_file(path: Path, data: bytes) -> None:
    """Replace a file that the user has named, or what a link there points to; a pipe or device is written to.

    Raises OSError.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        path.write_bytes(data)
    else:
        OwnFolder(target.parent).write(target.name, data)


def append_to(path: Path, text: str) -> None:
    """Add to a file that the environment names, which is the user's word. Raises OSError."""
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _check_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name:
        raise ValueError(f"{name!r} must be the name of one file, without a way to it")


def _is_link(folder: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _replace(folder: int, name: str, data: bytes, mode: int) -> None:
    file = _write_without_name(folder, data, mode)
    if file is None or not _name(file, folder, name):
        _write_under_temporary_name(folder, name, data, mode)


def _write_without_name(folder: int, data: bytes, mode: int) -> int | None:
    """A descriptor of a file that vanishes unless it is given a name; None on file systems that cannot do that."""
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        file = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, mode, dir_fd=folder)
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


def _name(file: int, folder: int, name: str) -> bool:
    """Give an open file its name and close it; whether that worked. An old file can only be replaced by a named one."""
    source = f"/proc/self/fd/{file}"  # as open(2) describes it for O_TMPFILE
    try:
        try:
            os.link(source, name, dst_dir_fd=folder)  # with a descriptor, os.link follows the source
        except FileExistsError:
            temporary = _temporary_name(name)
            os.link(source, temporary, dst_dir_fd=folder)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:  # no /proc, no links on this file system: the other way tells what is wrong, if anything is
        return False
    finally:
        os.close(file)
    return True


def _temporary_name(name: str) -> str:
    return f".{name}.{secrets.token_hex(4)}.tmp"


def _write_under_temporary_name(folder: int, name: str, data: bytes, mode: int) -> None:
    temporary = _temporary_name(name)
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder)
        try:
            _write_all(file, data)
        finally:
            os.close(file)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):  # the folder may be what failed; the first error is the one to raise
            os.unlink(temporary, dir_fd=folder)
        raise
