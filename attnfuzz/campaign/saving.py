"""Findings on disk: written as soon as they are confirmed, replaced as they shrink, never twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from attnfuzz.campaign.finding import Finding
from attnfuzz.corpus import Regression, RegressionError, load_regression, regression_name, write_regression
from attnfuzz.minimise import size_key

__all__ = ["SaveFolder"]


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
        self._device = device
        self._warn = warn
        self._warned = False
        self._own: dict[Path, set[Finding]] = {}
        self._earlier = _read_earlier(folder)

    def save(self, finding: Finding) -> None:
        """Write the finding's smallest case and remove the file of its last one; sets ``finding.path``."""
        regression = finding.regression(self._device)
        path = self._folder / regression_name(regression)
        known = self._known_file(path, finding, regression)
        if known is not None:
            self.forget(finding)
            finding.known_as = finding.path = known
            return
        superseded = self._superseded_by(finding, regression)
        if superseded is not None:
            regression = msgspec.structs.replace(regression, note=superseded.regression.note or regression.note)
        try:
            write_regression(regression, self._folder)
            if superseded is not None:
                self._replace(superseded)
                finding.replaces = superseded.path
        except OSError as error:
            self._complain(error)
            return
        if finding.path != path:
            self.forget(finding)
        self._own.setdefault(path, set()).add(finding)
        finding.path = path

    def forget(self, finding: Finding) -> None:
        """Remove the finding's file, unless it was there before or another finding has come down to the same case."""
        path, finding.path = finding.path, None
        if path is None or path not in self._own:
            return
        self._own[path].discard(finding)
        if self._own[path]:
            return
        del self._own[path]
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._complain(error)

    def _known_file(self, path: Path, finding: Finding, regression: Regression) -> Path | None:
        """An earlier file that says the same: the same case, or the same bug in a case that is no larger."""
        options = finding.declaration.options
        size = size_key(regression.case, options=options)
        for earlier in self._earlier:
            if earlier.path == path:
                return path
            if earlier.is_same_bug(regression) and size_key(earlier.regression.case, options=options) <= size:
                return earlier.path
        return None

    def _superseded_by(self, finding: Finding, regression: Regression) -> _Earlier | None:
        same = (earlier for earlier in self._earlier if earlier.is_same_bug(regression))
        return next(same, None) if finding.minimised else None

    def _replace(self, earlier: _Earlier) -> None:
        earlier.path.unlink(missing_ok=True)
        self._earlier.remove(earlier)

    def _complain(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"cannot write to {self._folder} ({error.strerror}); name a folder that can be written "
                "with --save-dir: findings are printed but not saved"
            )


def _read_earlier(folder: Path) -> list[_Earlier]:
    earlier = []
    for path in sorted(folder.glob("*.json")):
        try:
            earlier.append(_Earlier(path, load_regression(path)))
        except RegressionError:  # not ours to judge here: replay says what is wrong with it
            continue
    return earlier
