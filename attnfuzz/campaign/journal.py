"""The case that is being judged, on disk before it runs, in case the whole machine goes down with it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from attnfuzz.corpus import FindingRecord, Regression, encode_regression
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case

__all__ = ["Journal", "JournalFolder"]

_RECORD = FindingRecord(oracle="crash", kind="journal", message="this case was running when the campaign was cut off")


class Journal:
    """One file that always holds the latest case, as a regression file that ``attnfuzz replay`` takes.

    Without a path nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def write(self, declaration: Declaration, case: Case) -> None:
        """Replace what the file holds."""
        if self._file is None:
            return
        regression = Regression(
            problem=declaration.problem, kernel=declaration.target, case=case, finding=_RECORD, note="journal"
        )
        data = encode_regression(regression)
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))

    def close(self) -> None:
        """Close the file and leave it where it is."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class JournalFolder:
    """``.attnfuzz/journal-PID`` in the working directory, removed when the campaign ends in order.

    ``path`` is None where nothing can be written. ``left_over`` are the folders of campaigns that were cut off.
    """

    def __init__(self, parent: Path = Path(".attnfuzz")) -> None:
        self.left_over = [folder for folder in sorted(parent.glob("journal-*")) if not _is_running(folder)]
        self.path: Path | None = parent / f"journal-{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (parent / ".gitignore").write_text("*\n")
        except OSError:
            self.path = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._remove_if_empty(self.path.parent)

    @staticmethod
    def _remove_if_empty(parent: Path) -> None:
        if [path.name for path in parent.iterdir()] == [".gitignore"]:
            shutil.rmtree(parent, ignore_errors=True)


def _is_running(folder: Path) -> bool:
    pid = folder.name.partition("-")[2]
    return pid.isdecimal() and Path(f"/proc/{pid}").exists()
