"""The project that the working directory belongs to, and which code is its own. Torch-free.

What a saved case names runs without further question only where it is the project's own code (`why_foreign`); the
settings of a project are those in its root (`attnfuzz.config`).
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from pathlib import Path

_MARKERS = (("pyproject.toml", ".git"), (".attnfuzz",))
"""Marks of a project's folder; and, where there is no such folder, of the one that a search ran in."""
_INSTALLED = ("site-packages", "dist-packages")


def project_root(start: Path | None = None) -> Path:
    """The nearest folder that holds a pyproject.toml or .git, from ``start`` upwards, or else the nearest in which
    attnfuzz has searched; ``start`` if there is none.

    ``start`` is the working directory by default. The search ends below a folder that everybody can write to, such as
    /tmp, and below one that belongs to another user (root excepted): whoever that is could put a marker there.
    """
    start = (start or Path.cwd()).resolve()
    owners = {os.geteuid(), 0, start.stat().st_uid}
    folders = [start]
    for folder in start.parents:
        if everybody_can_write(folder) or folder.stat().st_uid not in owners:
            break
        folders.append(folder)
    for markers in _MARKERS:
        for folder in folders:
            if folder == Path.home().resolve() and markers is _MARKERS[-1]:  # all that one has would be its code
                continue
            if any((folder / marker).exists() for marker in markers):
                return folder
    return start


def everybody_can_write(path: Path) -> bool:
    """Whether any user may change what is there.

    A folder of one's own that is open to all is one's own choice, or how some file systems show every folder, unless it
    has the sticky bit, which says that strangers share it.
    """
    info = path.stat()
    is_open = bool(info.st_mode & stat.S_IWOTH)
    return is_open and (info.st_uid != os.geteuid() or bool(info.st_mode & stat.S_ISVTX))


def why_foreign(file: Path, root: Path) -> str | None:
    """Why ``file``, symbolic links resolved, is not code of the project in ``root``; None if it is."""
    place, root = file.resolve(), root.resolve()
    if not place.is_relative_to(root):
        return f"lies in {place}, outside the project's root {root}"
    installations = [Path(folder).resolve() for folder in map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))]
    is_below = any(place.is_relative_to(folder) for folder in installations if folder.is_relative_to(root))
    if is_below or not set(_INSTALLED).isdisjoint(place.relative_to(root).parts):
        return f"lies in {place}, which is installed in the project's root {root}, and not its own"
    for path in (place, *place.parents):
        if path.is_relative_to(root) and path.exists() and everybody_can_write(path):
            return f"lies in {place}, and everybody can write to {path}"
    return None


def working_folder() -> Path:
    """The working directory; a relative path where it has been removed, in which nothing is found."""
    try:
        return Path.cwd()
    except OSError:
        return Path()


def search_path(folder: Path | None = None) -> list[str]:
    """Where a kernel's modules are looked for: Python's own path, ``folder``, its project's root, and ``src`` there.

    ``folder`` is the working directory by default. What is installed comes first, so that no file of a project is taken
    for torch or for a module of Python's own.
    """
    folder = Path.cwd() if folder is None else folder
    root = project_root(folder)
    return list(dict.fromkeys((*sys.path, *map(os.fspath, (folder, root, root / "src")))))
