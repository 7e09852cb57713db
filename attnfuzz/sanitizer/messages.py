"""What the process under the sanitizer is told, and what it writes down while it runs. Torch-free."""

from __future__ import annotations

from pathlib import Path

import msgspec

from attnfuzz.problems.cases import Problem

__all__ = ["Note", "Place", "Work", "read_notes"]


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`cases` of one kernel, to run one after the other on `device`; notes go to the file `notes`."""

    target: str
    problem: Problem
    cases: tuple[msgspec.Raw, ...]
    device: str
    notes: str


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where a tensor lies, in bytes."""

    name: str
    start: int
    nbytes: int


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A case is about to run (`tensors` are there), has `done` so, or has `raised`. `kind`: the exception's type."""

    case: int
    tensors: tuple[Place, ...] = ()
    done: bool = False
    raised: str | None = None
    kind: str = ""


def read_notes(path: Path) -> list[Note]:
    """What has been written; a last line that was cut off with its process is left out."""
    if not path.exists():
        return []
    complete = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=Note) for line in complete]
