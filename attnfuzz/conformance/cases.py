"""The cases, each with the feature of inputs that it stands for. Sets are never changed; a new one is a new version."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from attnfuzz.data_files import read_data_file
from attnfuzz.oracles.verdict import OracleName
from attnfuzz.problems.cases import Case, Problem, case_from_builtins

__all__ = ["FORMAT", "ConformanceSet", "Entry", "load_set", "set_file"]

FORMAT = "attnfuzz.conformance-set/1"
_LATEST = 1
_MOST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """``strict``: the case is about what translating it for a kernel would change, so it is put to kernels as it is.

    ``law``: the relation, or else the result that two runs share, that is asked of it, in place of the result alone.
    ``note``: the hash of the saved case that it is a copy of.
    """

    group: str
    feature: str
    case: Case
    strict: bool = False
    law: OracleName | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class ConformanceSet:
    """``seed``: of the drawn cases."""

    version: int
    seed: int
    entries: tuple[Entry, ...]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    group: str
    feature: str
    problem: Problem
    strict: bool
    law: OracleName | None
    note: str
    case: dict[str, object]


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    seed: int
    entries: tuple[_Entry, ...]


def set_file(version: int) -> Path:
    """Where the set lies."""
    return Path(__file__).parent / f"set-{version}.json"


def load_set(version: int = _LATEST) -> ConformanceSet:
    """The set of a version."""
    document = msgspec.json.decode(read_data_file(set_file(version), _MOST_BYTES), type=_Document)
    entries = tuple(
        Entry(one.group, one.feature, case_from_builtins(one.problem, one.case), one.strict, one.law, one.note)
        for one in document.entries
    )
    return ConformanceSet(document.version, document.seed, entries)
