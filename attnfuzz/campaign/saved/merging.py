"""Saved findings of several machines brought together in a folder: one case of each bug, run again here.

Bugs are told apart by the rules of a campaign (`attnfuzz.identity`), applied to what files say of themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from attnfuzz.campaign.finding import one_of_each
from attnfuzz.campaign.saved.replay import SavedCase, load_named, replay
from attnfuzz.corpus import Regression, regression_name, write_regression
from attnfuzz.declaration import KernelLoadError
from attnfuzz.identity.bug import Bug, Signature, are_one
from attnfuzz.identity.features import kernel_parts, named, needs
from attnfuzz.judging.runner import Runner
from attnfuzz.minimise import size_key
from attnfuzz.own_files import OwnFolder
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.verdict import MOST_PLACES, Sight


@dataclass(frozen=True, slots=True)
class SavedBug:
    """The files that are about one bug, the one that says most about it first. At least one."""

    files: tuple[SavedCase, ...]

    @property
    def regression(self) -> Regression:
        """The regression of the first file."""
        return self.files[0].regression

    @property
    def signature(self) -> Signature:
        """The signature of the bug in the first file."""
        return _signature(self.regression)

    @property
    def bug(self) -> Bug:
        finding = self.regression.finding
        features = named(finding.features, self.regression.case)
        return Bug.shown_by(self.regression.kernel, finding, features, flaky=finding.is_flaky)

    @property
    def stands_alone(self) -> bool:
        """Whether no other case can be told to be the same bug: it is marked fixed, or does not say how it fails."""
        return self.regression.status == "fixed" or not self.regression.finding.kind


def tell_apart(saved: Iterable[SavedCase]) -> list[SavedBug]:
    """Every bug that ``saved`` is about, sorted by kernel and signature.

    A file that is marked fixed, or does not say how its case fails, stands for itself: only files with the very same
    case join it.
    """
    bugs: list[SavedBug] = []
    for case in sorted(_by_name(saved), key=_preference):
        same = [] if case.stands_alone else [bug for bug in bugs if not bug.stands_alone and are_one(bug, case)]
        if not same:
            bugs.append(case)
            continue
        mine = kernel_parts(case.signature.features)
        most = max(same, key=lambda bug: len(mine & kernel_parts(bug.signature.features)))
        bugs[bugs.index(most)] = SavedBug((*most.files, *case.files))
    return sorted(bugs, key=lambda bug: (bug.signature.symptom.kernel, str(bug.signature), _name(bug.files[0])))


def represent(bug: SavedBug, kept: SavedCase, *, remark: str = "") -> Regression:
    """The regression that stands for ``bug``: that of ``kept``, with what people and oracles said in the other files.

    ``remark`` is added to its note.
    """
    regression = kept.regression
    mine = _signature(regression)
    others = [file.regression for file in bug.files if _signature(file.regression) != mine]
    its = [
        Sight(
            oracle=other.finding.oracle,
            kind=other.finding.kind,
            message=other.finding.message,
            features=other.finding.features[:MOST_PLACES],
        )
        for other in others
    ]
    also = one_of_each((*regression.finding.also, *its, *(sight for other in others for sight in other.finding.also)))
    notes = [regression.note, *(file.regression.note for file in bug.files)]
    note = next(filter(None, notes), "")
    issue = next(filter(None, (regression.issue, *(file.regression.issue for file in bug.files))), "")
    return msgspec.structs.replace(
        regression,
        finding=msgspec.structs.replace(regression.finding, also=also),
        issue=issue,
        note="; ".join(filter(None, (note, remark))),
    )


def _by_name(saved: Iterable[SavedCase]) -> Iterator[SavedBug]:
    """Files with the same case, kernel and oracle; first the one that people have said most about."""
    files: dict[str, list[SavedCase]] = {}
    for one in saved:
        files.setdefault(_name(one), []).append(one)
    for same in files.values():
        yield SavedBug(tuple(sorted(same, key=lambda one: (one.regression.status != "fixed", not one.regression.note))))


def _preference(case: SavedBug) -> tuple[Any, ...]:
    """As in a campaign: first the case that needs least, then the smallest."""
    features = case.signature.features
    needed = len(kernel_parts(features)), len(needs(features)), len(features)
    return *needed, len(case.regression.preceding), size_key(case.regression.case)


def _signature(regression: Regression) -> Signature:
    finding = regression.finding
    return Signature.of(regression.kernel, finding, named(finding.features, regression.case))


def _name(saved: SavedCase) -> str:
    return regression_name(saved.regression)


Outcome = Literal["fails", "passes", "unverified"]
_TRIES = 3
_MAX_CASES = 8
"""Most cases that are run of one bug: a hundred machines may have found it, and been right until it was repaired."""
_ORDER: tuple[Outcome, ...] = ("fails", "unverified", "passes")


@dataclass(frozen=True, slots=True)
class Checked:
    """One case, run again on the kernel it names. ``reason`` says why it is unverified."""

    saved: SavedCase
    outcome: Outcome
    reason: str = ""


def check_again(bug: SavedBug, runner: Runner, *, trust: bool = False) -> Checked:
    """The first case of ``bug`` that fails; if none does, the first that may fail elsewhere; else the first.

    ``trust``: see `load_named`. Raises ExecutorUnavailable.
    """
    best: Checked | None = None
    distinct: dict[str, SavedCase] = {}
    for saved in bug.files:
        distinct.setdefault(_name(saved), saved)
    for saved in list(distinct.values())[:_MAX_CASES]:
        checked = _check(saved, runner, trust=trust)
        if best is None or _ORDER.index(checked.outcome) < _ORDER.index(best.outcome):
            best = checked
        if best.outcome == "fails" or saved.regression.status == "fixed":
            break
    if best is None:
        raise ValueError("a bug without files cannot be checked; it must have at least one")
    return best


def _check(saved: SavedCase, runner: Runner, *, trust: bool) -> Checked:
    try:
        kernel = load_named(saved, runner, trust=trust).target
        for _ in range(_TRIES):
            results = list(replay([saved], runner, kernels=[kernel]))
            objections = [result.objection for result in results if result.objection]
            if objections or not results:
                reason = objections[0] if objections else f"the kernel does not compute {saved.regression.problem}"
                return Checked(saved, "unverified", reason)
            if any(result.failed for result in results):
                return Checked(saved, "fails")
    except (KernelLoadError, CaseTooLarge) as error:
        return Checked(saved, "unverified", str(error))
    found_on = saved.regression.environment.device
    if saved.regression.status == "open" and found_on not in ("", runner.device_name):
        return Checked(saved, "unverified", f"passes on {runner.device_name}, was found on {found_on}")
    return Checked(saved, "passes")


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
        remark = f"passed on {self._device} when it was merged, {datetime.now(UTC).date().isoformat()}"
        regression = represent(bug, checked.saved, remark=remark if passes else "")
        path = folder / regression_name(regression)
        is_new = not path.exists()
        if is_new:
            write_regression(regression, folder, below=self.folder)
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
            OwnFolder(path.parent).remove(path.name)
        return tuple(larger)
