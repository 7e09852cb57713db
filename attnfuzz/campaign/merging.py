"""Saved findings of several machines brought together: told apart by signature, the smallest case of each first.

The rules are those of a campaign (`attnfuzz.campaign.same_bug`), applied to what regression files say of themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from attnfuzz.campaign.aspects import aspects, needs
from attnfuzz.campaign.finding import one_of_each
from attnfuzz.campaign.replay import SavedCase
from attnfuzz.campaign.same_bug import are_same_bug
from attnfuzz.campaign.signature import Signature, Symptom
from attnfuzz.corpus import FindingRecord, Regression, regression_name
from attnfuzz.minimise import size_key
from attnfuzz.oracles.verdict import MOST_PLACES, Sight

__all__ = ["SavedBug", "represent", "tell_apart"]


@dataclass(frozen=True, slots=True)
class SavedBug:
    """The files that are about one bug, the one that says most about it first. At least one."""

    files: tuple[SavedCase, ...]

    @property
    def signature(self) -> Signature:
        """What the first file says of the bug."""
        return _signature(self.files[0].regression)


@dataclass(frozen=True, slots=True)
class _Case:
    """What `are_same_bug` looks at, with the files that hold this very case."""

    files: tuple[SavedCase, ...]
    signature: Signature
    is_flaky: bool
    said: FindingRecord


def tell_apart(saved: Iterable[SavedCase]) -> list[SavedBug]:
    """Every bug that ``saved`` is about, sorted by kernel and signature.

    A file that is marked fixed, or does not say how its case fails, stands for itself: only files with the very same
    case join it.
    """
    cases = sorted((_case(files) for files in _by_name(saved)), key=_preference)
    groups: list[list[_Case]] = []
    for case in cases:
        group = _group_of(case, groups)
        if group is None:
            groups.append([case])
        else:
            group.append(case)
    bugs = [SavedBug(tuple(file for case in group for file in case.files)) for group in groups]
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
    return msgspec.structs.replace(
        regression,
        finding=msgspec.structs.replace(regression.finding, also=also),
        note="; ".join(filter(None, (note, remark))),
    )


def _by_name(saved: Iterable[SavedCase]) -> Iterable[tuple[SavedCase, ...]]:
    """Files with the same case, kernel and oracle; first the one that people have said most about."""
    files: dict[str, list[SavedCase]] = {}
    for one in saved:
        files.setdefault(_name(one), []).append(one)
    for same in files.values():
        yield tuple(sorted(same, key=lambda one: (one.regression.status != "fixed", not one.regression.note)))


def _case(files: tuple[SavedCase, ...]) -> _Case:
    regression = files[0].regression
    return _Case(files, _signature(regression), regression.finding.is_flaky, regression.finding)


def _group_of(case: _Case, groups: Sequence[list[_Case]]) -> list[_Case] | None:
    if _stands_alone(case):
        return None
    same = [group for group in groups if not _stands_alone(group[0]) and are_same_bug(group[0], case)]
    mine = aspects(case.signature.features)
    return max(same, key=lambda group: len(mine & aspects(group[0].signature.features)), default=None)


def _stands_alone(case: _Case) -> bool:
    regression = case.files[0].regression
    return regression.status == "fixed" or not regression.finding.kind


def _preference(case: _Case) -> tuple[Any, ...]:
    """As in a campaign: first the case that needs least, then the smallest."""
    regression = case.files[0].regression
    features = case.signature.features
    needed = len(aspects(features)), len(needs(features)), len(features)
    return *needed, len(regression.preceding), size_key(regression.case)


def _signature(regression: Regression) -> Signature:
    finding = regression.finding
    return Signature(Symptom.of(regression.kernel, finding), frozenset(finding.features))


def _name(saved: SavedCase) -> str:
    return regression_name(saved.regression)
