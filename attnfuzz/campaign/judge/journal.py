"""Writes cases to disk before they run, in case the whole machine goes down with one."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from attnfuzz.corpus import FindingRecord, Regression, RegressionError, encode_regression, load_regression
from attnfuzz.data_files import read_data_file
from attnfuzz.declaration import Declaration
from attnfuzz.isolation.claims import Claim, is_claimed
from attnfuzz.oracles.registry import CRASH
from attnfuzz.own_files import LinkError, OwnFolder
from attnfuzz.problems.cases import Case

FOLDER = Path(".attnfuzz")
"""In the working directory: what campaigns keep there for themselves; ignored by git."""

_PREFIX = "journal-"
_CALLED = re.compile(_PREFIX + r"\d+(-\d+)?")
_CASE = re.compile(r"worker-\d+(-\d+)?\.json")
_ANNOUNCED = "announced"
"""In a folder that was left over and has been spoken of."""
_RECORD = FindingRecord(
    oracle=CRASH.name, kind="journal", message="this case was running when the campaign was cut off"
)
_NOTE = "journal"
_IGNORE = ".gitignore"
_IGNORE_ALL = b"*\n"


class Journal:
    """Files that always hold what is being judged, each a regression file that ``attnfuzz replay`` takes.

    One case is in ``path`` itself, as is the first of a batch; the others are in files beside it. Without a path, or
    once the disk is full, nothing is written: a campaign can do without a journal.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._slots: list[int] = []
        if path is not None:  # the files of a worker whose place this one takes are no longer what is being judged
            for old in path.parent.glob(f"{path.stem}-*{path.suffix}"):
                OwnFolder(path.parent).remove(old.name)

    def write(self, declaration: Declaration, cases: Sequence[Case]) -> None:
        """Replace what the files hold by ``cases``."""
        if self._path is None:
            return
        try:
            for slot, case in enumerate(cases):
                problem, kernel = declaration.problem, declaration.target
                written = Regression(problem=problem, kernel=kernel, case=case, finding=_RECORD, note=_NOTE)
                self._write_slot(slot, encode_regression(written))
            self._keep(len(cases))
        except OSError:
            with contextlib.suppress(OSError):  # of a folder that cannot be written to any more
                self._keep(0)
            self.close()
            self._path = None

    def close(self) -> None:
        """Close the files and leave them where they are."""
        while self._slots:
            os.close(self._slots.pop())

    def _write_slot(self, slot: int, data: bytes) -> None:
        if slot == len(self._slots):
            path = self._path_of(slot)
            OwnFolder(path.parent).remove(path.name)  # of the worker whose place this one takes
            self._slots.append(OwnFolder(path.parent).create(path.name))
        written = os.pwrite(self._slots[slot], data, 0)
        if written < len(data):
            raise OSError(errno.ENOSPC, "the journal was cut short")
        os.ftruncate(self._slots[slot], len(data))

    def _keep(self, count: int) -> None:
        """Remove the files of all but the first ``count`` slots."""
        while len(self._slots) > count:
            os.close(self._slots.pop())
            path = self._path_of(len(self._slots))
            OwnFolder(path.parent).remove(path.name)

    def _path_of(self, slot: int) -> Path:
        if self._path is None:
            raise RuntimeError("a journal without a path has no files")
        return self._path if slot == 0 else self._path.with_name(f"{self._path.stem}-{slot}{self._path.suffix}")


class JournalFolder:
    """``.attnfuzz/journal-PID`` in the working directory, removed when the campaign ends in order, unless ``keep``.

    ``path`` is None where nothing can be written. ``left_over`` are the folders of campaigns that were cut off, until
    they have been ``announced``. Raises LinkError for a link in place of any of them.
    """

    def __init__(self, parent: Path = FOLDER) -> None:
        self.keep = False
        self._around = _campaigns_folder(parent)
        self.left_over = [folder for folder in sorted(parent.glob(f"{_PREFIX}*")) if self._is_news(folder)]
        self.path: Path | None = None
        self._claim: Claim | None = None
        self._folder: OwnFolder | None = None
        try:
            self._folder = _new_folder(self._around)
            self.path = self._folder.path
            self._claim = Claim(self.path)
            self._around.refuse_link(_IGNORE)
            if not (parent / _IGNORE).exists():  # git is to ignore what lies here
                self._around.write(_IGNORE, _IGNORE_ALL)
        except OSError as error:
            self.close()
            self.path = None
            if isinstance(error, LinkError):
                raise

    def announced(self) -> None:
        """The user knows of what is left over, which stays until it is replayed or removed."""
        for folder in self.left_over:
            with contextlib.suppress(OSError):  # it has vanished, or cannot be written: it is spoken of once more
                os.close(self._around.inner(folder.name).create(_ANNOUNCED))
        self.left_over = []

    def close(self) -> None:
        """Remove the folder, and the one around it if nothing else is there."""
        if self._claim is not None:
            self._claim.release()
        if self._folder is not None and not self.keep:
            self._folder.remove_all()
            remove_if_empty(self._around.path)

    def _is_news(self, folder: Path) -> bool:
        """Whether a campaign was cut off here while it judged cases, and nobody knows yet."""
        if not _CALLED.fullmatch(folder.name):
            return False
        self._around.refuse_link(folder.name)
        if is_claimed(folder):
            return False
        self._around.inner(folder.name).refuse_link(_ANNOUNCED)
        return not (folder / _ANNOUNCED).exists() and any(_CASE.fullmatch(file.name) for file in folder.glob("*.json"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def was_running(regression: Regression) -> bool:
    """Whether a file is of a journal: its case was being judged when a campaign was cut off, and may well pass."""
    return (regression.finding.oracle, regression.finding.kind) == (_RECORD.oracle, _RECORD.kind)


def is_in_journal(file: Path) -> bool:
    """Whether a file is one that a campaign wrote into its journal: by its place and name, and by what it holds.

    A copy elsewhere is its owner's, and so is a link.
    """
    try:
        place = _place_of(file)
        folders = (place.parent.parent, place.parent)
        is_ours = folders[0].name == FOLDER.name and _CALLED.fullmatch(folders[1].name) and _CASE.fullmatch(place.name)
        if not is_ours or any(path.is_symlink() for path in (*folders, place)) or not place.samefile(file):
            return False
        regression = load_regression(place)
    except (OSError, RegressionError):  # it has vanished, or is nobody's journal
        return False
    return was_running(regression) and regression.note == _NOTE


def forget(files: Iterable[Path]) -> None:
    """Remove files of journals, and folders of which nothing is left; not those of a campaign that still runs."""
    for file in files:
        if not is_in_journal(file):
            continue
        place = _place_of(file)
        if is_claimed(place.parent):
            continue
        around = place.parent.parent
        folder = _campaigns_folder(around).inner(place.parent.name)
        with contextlib.suppress(OSError):  # it has vanished, or cannot be removed
            folder.remove(place.name)
            if set(folder.names()) <= {_ANNOUNCED}:
                folder.remove(_ANNOUNCED)
                folder.remove_empty()
                remove_if_empty(around)


def remove_if_empty(parent: Path) -> None:
    """Remove ``.attnfuzz`` once nothing is kept in it."""
    folder = _campaigns_folder(parent)
    with contextlib.suppress(OSError):  # it has vanished, or cannot be removed
        names = folder.names()
        if names == [_IGNORE] and read_data_file(parent / _IGNORE, len(_IGNORE_ALL)) == _IGNORE_ALL:
            folder.remove(_IGNORE)
            names = []
        if not names:
            folder.remove_empty()


def _place_of(file: Path) -> Path:
    """Its absolute path, with links as they are."""
    return Path(os.path.abspath(file))  # noqa: PTH100 - resolve() would follow them


def _campaigns_folder(path: Path) -> OwnFolder:
    """``.attnfuzz``, which is no link, wherever that lies."""
    return OwnFolder(path, below=path.parent)


def _new_folder(parent: OwnFolder) -> OwnFolder:
    """One that was not there: in a container the process ID is often that of the campaign before."""
    parent.make()
    own = f"{_PREFIX}{os.getpid()}"
    names = itertools.chain([own], (f"{own}-{n}" for n in itertools.count(2)))
    while True:
        with contextlib.suppress(FileExistsError):  # the next name, then
            return parent.make_new(next(names))
