"""The folder that findings of several machines are brought together in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from attnfuzz.campaign.merging import SavedBug, represent
from attnfuzz.campaign.replay import SavedCase
from attnfuzz.campaign.verifying import Checked
from attnfuzz.corpus import regression_name, write_regression

__all__ = ["PASSING", "Kept", "MergedFolder"]

PASSING = "passing"
"""Where cases go that fail no longer: neither replay nor pytest takes them from there."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Where a bug's case lies now; ``replaced`` are the larger ones that lay in the folder before."""

    path: Path
    is_new: bool
    replaced: tuple[Path, ...] = ()


class MergedFolder:
    """Takes one case of each bug. Nothing outside the folder is ever changed.

    In it, an open case is removed for a smaller one of the same bug that was seen to fail, as `attnfuzz explore` does.
    """

    def __init__(self, folder: Path, *, device: str) -> None:
        self.folder = folder
        self._device = device

    def keep(self, bug: SavedBug, checked: Checked) -> Kept:
        """Write ``checked``, one of the files of ``bug``, for all of them. Raises OSError."""
        mine = [file for file in bug.files if self._holds(file)]
        passes = checked.outcome == "passes" and checked.saved.regression.status == "open"
        if self._holds(checked.saved):
            return Kept(checked.saved.path, is_new=False, replaced=self._remove(mine, checked))
        if passes and mine:
            return Kept(mine[0].path, is_new=False)
        folder = self.folder / PASSING if passes else self.folder
        regression = represent(bug, checked.saved, remark=self._remark() if passes else "")
        path = folder / regression_name(regression)
        is_new = not path.exists()
        if is_new:
            write_regression(regression, folder)
        return Kept(path, is_new=is_new, replaced=self._remove(mine, checked))

    def _holds(self, file: SavedCase) -> bool:
        return file.path.parent.resolve() == self.folder.resolve()

    def _remove(self, mine: Iterable[SavedCase], checked: Checked) -> tuple[Path, ...]:
        """Remove the folder's own cases that one seen to fail makes superfluous."""
        if checked.outcome != "fails" or checked.saved.regression.status == "fixed":
            return ()
        name = regression_name(checked.saved.regression)
        larger = [one.path for one in mine if one.regression.status == "open" and one.path.name != name]
        for path in larger:
            path.unlink(missing_ok=True)
        return tuple(larger)

    def _remark(self) -> str:
        return f"passed on {self._device} when it was merged, {datetime.now(UTC).date().isoformat()}"
