"""What is being judged, on disk before it runs, in case the whole machine goes down with it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from attnfuzz.corpus import FindingRecord, Regression, encode_regression
from attnfuzz.declaration import Declaration
from attnfuzz.isolation.claims import Claim, is_claimed
from attnfuzz.problems.cases import Case

__all__ = ["Journal", "JournalFolder", "forget", "is_in_journal", "remove_if_empty", "was_running"]

_PREFIX = "journal-"
_ANNOUNCED = "announced"
"""In a folder that was left over and has been spoken of."""
_RECORD = FindingRecord(oracle="crash", kind="journal", message="this case was running when the campaign was cut off")


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
                old.unlink(missing_ok=True)

    def write(self, declaration: Declaration, cases: Sequence[Case]) -> None:
        """Replace what the files hold by ``cases``."""
        if self._path is None:
            return
        try:
            for slot, case in enumerate(cases):
                self._write_slot(slot, _encoded(declaration, case))
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
            self._slots.append(os.open(self._path_of(slot), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
        written = os.pwrite(self._slots[slot], data, 0)
        if written < len(data):
            raise OSError(errno.ENOSPC, "the journal was cut short")
        os.ftruncate(self._slots[slot], len(data))

    def _keep(self, count: int) -> None:
        """Remove the files of all but the first ``count`` slots."""
        while len(self._slots) > count:
            os.close(self._slots.pop())
            self._path_of(len(self._slots)).unlink(missing_ok=True)

    def _path_of(self, slot: int) -> Path:
        if self._path is None:
            raise RuntimeError("a journal without a path has no files")
        return self._path if slot == 0 else self._path.with_name(f"{self._path.stem}-{slot}{self._path.suffix}")


class JournalFolder:
    """``.attnfuzz/journal-PID`` in the working directory, removed when the campaign ends in order, unless ``keep``.

    ``path`` is None where nothing can be written. ``left_over`` are the folders of campaigns that were cut off, until
    they have been ``announced``.
    """

    def __init__(self, parent: Path = Path(".attnfuzz")) -> None:
        self.keep = False
        self.left_over = [folder for folder in sorted(parent.glob(f"{_PREFIX}*")) if _is_news(folder)]
        self.path: Path | None = None
        self._claim: Claim | None = None
        try:
            self.path = _new_folder(parent)
            self._claim = Claim(self.path)
            (parent / ".gitignore").write_text("*\n")
        except OSError:
            self.close()
            self.path = None

    def announced(self) -> None:
        """The user knows of what is left over, which stays until it is replayed or removed."""
        for folder in self.left_over:
            with contextlib.suppress(OSError):  # it has vanished, or cannot be written: it is spoken of once more
                (folder / _ANNOUNCED).touch()
        self.left_over = []

    def close(self) -> None:
        """Remove the folder, and the one around it if nothing else is there."""
        if self._claim is not None:
            self._claim.release()
        if self.path is not None and not self.keep:
            shutil.rmtree(self.path, ignore_errors=True)
            remove_if_empty(self.path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def was_running(regression: Regression) -> bool:
    """Whether a file is of a journal: its case was being judged when a campaign was cut off, and may well pass."""
    return (regression.finding.oracle, regression.finding.kind) == (_RECORD.oracle, _RECORD.kind)


def is_in_journal(file: Path) -> bool:
    """Whether a file lies where campaigns keep journals; a copy elsewhere is its owner's."""
    return file.resolve().parent.name.startswith(_PREFIX)


def forget(files: Iterable[Path]) -> None:
    """Remove files of journals, and folders of which none is left; not those of a campaign that still runs."""
    for file in files:
        folder = file.parent
        if not is_in_journal(file) or is_claimed(folder):
            continue
        with contextlib.suppress(OSError):  # it has vanished, or cannot be removed
            file.unlink()
            if not any(folder.glob("*.json")):
                shutil.rmtree(folder)
                remove_if_empty(folder.parent)


def remove_if_empty(parent: Path) -> None:
    """Remove ``.attnfuzz`` once nothing is kept in it."""
    with contextlib.suppress(OSError):  # it has vanished, or cannot be removed
        if {path.name for path in parent.iterdir()} <= {".gitignore"}:
            shutil.rmtree(parent)


def _is_news(folder: Path) -> bool:
    """Whether a campaign was cut off here while it judged cases, and nobody knows yet."""
    return not (is_claimed(folder) or (folder / _ANNOUNCED).exists()) and any(folder.glob("*.json"))


def _new_folder(parent: Path) -> Path:
    """One that was not there: in a container the process ID is often that of the campaign before."""
    parent.mkdir(parents=True, exist_ok=True)
    own = f"{_PREFIX}{os.getpid()}"
    names = itertools.chain([own], (f"{own}-{n}" for n in itertools.count(2)))
    for name in names:
        with contextlib.suppress(FileExistsError):  # the next name, then
            (parent / name).mkdir()
            break
    return parent / name


def _encoded(declaration: Declaration, case: Case) -> bytes:
    regression = Regression(
        problem=declaration.problem, kernel=declaration.target, case=case, finding=_RECORD, note="journal"
    )
    return encode_regression(regression)
