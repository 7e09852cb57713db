"""Findings on disk: written as soon as they are confirmed, replaced as they shrink, never twice.

Where the folder cannot be written (a full disk, no permission, a folder that vanished with the one around it), they go
to another until it can be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.saved.state import FALLBACK, LAST_RESORT
from attnfuzz.corpus import Regression, RegressionError, load_regression, regression_name, write_regression
from attnfuzz.minimise import size_key
from attnfuzz.own_files import OwnFolder


@dataclass(frozen=True, slots=True)
class _Earlier:
    """A file that was there before the campaign."""

    path: Path
    regression: Regression

    def is_same_bug(self, other: Regression) -> bool:
        mine, its = self.regression, other
        return (
            mine.status == "open"
            and (mine.problem, mine.kernel) == (its.problem, its.kernel)
            and (mine.finding.oracle, mine.finding.kind, set(mine.finding.features))
            == (its.finding.oracle, its.finding.kind, set(its.finding.features))
        )


class SaveFolder:
    """The folder that findings are saved in.

    Files that were there before the campaign are left as they are, but for one: an open regression with the signature
    of a finding that has shrunk to a smaller case is replaced by it, and hands its note on.
    """

    def __init__(self, folder: Path, *, device: str, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._is_new = not folder.exists()
        self._device = device
        self._warn = warn
        self._warned = False
        self._last_resort: Path | None = None
        self._own: dict[Path, set[Finding]] = {}
        OwnFolder(folder).remove_leftovers()
        self._earlier = _read_earlier(folder)

    def save(self, finding: Finding) -> None:
        """Write the finding's smallest case and remove the file of its last one; sets ``finding.path``."""
        regression = finding.regression(self._device)
        name = regression_name(regression)
        known = self._known_file(self._folder / name, finding, regression)
        if known is not None:
            self.forget(finding)
            finding.known_as = finding.path = known
            return
        same = (earlier for earlier in self._earlier if earlier.is_same_bug(regression))
        superseded = next(same, None) if finding.minimised else None
        if superseded is not None:
            said = superseded.regression
            regression = msgspec.structs.replace(regression, issue=said.issue, note=said.note or regression.note)
        path = self._write(regression)
        if path is None:
            return
        if superseded is not None and path.parent == self._folder:
            self._earlier.remove(superseded)
            with contextlib.suppress(OSError):  # both then stay, and say the same
                _remove(superseded.path)
            finding.replaces = superseded.path
        if finding.path != path:
            self.forget(finding)
        self._own.setdefault(path, set()).add(finding)
        finding.path = path

    def save_if_missing(self, finding: Finding) -> None:
        """Save a finding that is not, or not in the folder, or no longer."""
        path = finding.path
        if path is None or path.parent != self._folder or not path.exists():
            self.save(finding)

    def adopt(self, finding: Finding) -> None:
        """Take a finding's file for this campaign's own: an earlier part of it has written it.

        Only one that is in the folders of this campaign and holds the finding: it will be replaced and removed.
        """
        if finding.path is not None and finding.known_as is None and self._holds(finding.path, finding):
            self._earlier = [earlier for earlier in self._earlier if earlier.path != finding.path]
            self._own.setdefault(finding.path, set()).add(finding)

    def _holds(self, path: Path, finding: Finding) -> bool:
        if path.parent.resolve() not in (self._folder.resolve(), FALLBACK.resolve()):
            return False
        try:
            saved = load_regression(path)
        except RegressionError:  # gone, or another's
            return False
        mine = (finding.declaration.target, finding.case, finding.preceding)
        return mine == (saved.kernel, saved.case, saved.preceding)

    def forget(self, finding: Finding) -> None:
        """Remove the finding's file, unless it was there before or another finding has come down to the same case.

        And the folder, if it was not there before and nothing else lies in it.
        """
        path, finding.path = finding.path, None
        if path is None or path not in self._own:
            return
        self._own[path].discard(finding)
        if self._own[path]:
            return
        del self._own[path]
        with contextlib.suppress(OSError):  # a file too many is no loss
            _remove(path)
        if self._is_new and path.parent == self._folder:
            with contextlib.suppress(OSError):  # it is not empty, or a folder too many
                OwnFolder(self._folder).remove_empty()

    def _write(self, regression: Regression) -> Path | None:
        """Write to the folder, or else to where it can be written; None if that is nowhere."""
        try:
            path = write_regression(regression, self._folder)
        except OSError as error:
            return self._write_elsewhere(regression, error)
        self._warned = False
        return path

    def _write_elsewhere(self, regression: Regression, because: OSError) -> Path | None:
        for folder in self._other_folders():
            try:
                path = write_regression(regression, folder, below=_followed(folder))
            except OSError:  # the next one, then; that of the folder is what there is to tell
                continue
            self._complain(because, f"findings go to {folder} until it can be")
            return path
        self._complain(because, "findings are printed but not saved")
        return None

    def _other_folders(self) -> Iterator[Path]:
        yield FALLBACK
        if self._last_resort is None:
            with contextlib.suppress(OSError):  # no room there either: findings are printed, which is told
                self._last_resort = OwnFolder.temporary(LAST_RESORT).path
        if self._last_resort is not None:
            yield self._last_resort

    def _known_file(self, path: Path, finding: Finding, regression: Regression) -> Path | None:
        """An earlier file that says the same: the same case, or the same bug in a case that is no larger."""
        options = finding.declaration.options
        size = size_key(regression.case, options=options)
        for earlier in self._earlier:
            if not earlier.path.exists():
                continue
            if earlier.path == path:
                return path
            if earlier.is_same_bug(regression) and size_key(earlier.regression.case, options=options) <= size:
                return earlier.path
        return None

    def _complain(self, error: OSError, consequence: str) -> None:
        """Say it once, until it is over."""
        if not self._warned:
            self._warned = True
            self._warn(
                f"cannot write to {self._folder} ({error.strerror or error}): {consequence}; make room there, or name "
                "a folder that can be written with --save-dir"
            )


def _followed(folder: Path) -> Path:
    """How far links on the way to ``folder`` are followed: nobody typed that of the fallback."""
    return Path() if folder == FALLBACK else folder


def _remove(path: Path) -> None:
    OwnFolder(path.parent, below=_followed(path.parent)).remove(path.name)


def _read_earlier(folder: Path) -> list[_Earlier]:
    earlier = []
    for path in sorted(folder.glob("*.json")):
        try:
            earlier.append(_Earlier(path, load_regression(path)))
        except RegressionError:  # not ours to judge here: replay says what is wrong with it
            continue
    return earlier
