"""Mutants that no permitted input can tell from the kernel: listed one by one, each with the argument why.

The list is a file of TOML, by default ``equivalent_mutants.toml`` beside the kernel's source, or in a package that this
lies in:

    [[equivalent]]
    file = "paged_walk.py"          # relative to the list
    function = "attend_pages"
    operator = "range_bound"
    line = "for start in range(begin, end, TILE):"
    becomes = "for start in range(begin, end + 1, TILE):"
    reason = "The tile that this adds is masked as a whole: its tokens have weight 0, and nothing of it is read."

``line`` and ``becomes`` are the lines that differ, without what they are indented by. An entry that no mutant matches
any more is stale.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from attnfuzz.data_files import is_regular_file, read_data_file
from attnfuzz.declaration import KernelLoadError
from attnfuzz.mutation.mutants import Mutant

FILE_NAME = "equivalent_mutants.toml"
_LEAST_REASON = 20
_MOST_BYTES = 1 << 20


class EquivalentMutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One equivalent mutant and the argument."""

    file: str
    function: str
    operator: str
    line: str
    becomes: str
    reason: str


class _List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    equivalent: tuple[EquivalentMutant, ...] = ()


@dataclass(frozen=True, slots=True)
class Equivalents:
    """The entries of one or more lists, each with the file that it is about."""

    entries: Sequence[tuple[Path, EquivalentMutant]]

    def reason(self, mutant: Mutant) -> str | None:
        """The argument why ``mutant`` is equivalent; None if it is not listed."""
        return next((entry.reason for path, entry in self.entries if _matches(path, entry, mutant)), None)

    def stale(self, mutants: Iterable[Mutant]) -> list[EquivalentMutant]:
        """Entries that match none of ``mutants``, though these are of their file and function."""
        mutants = list(mutants)
        functions = {(mutant.path, mutant.function) for mutant in mutants}
        return [
            entry
            for path, entry in self.entries
            if (path, entry.function) in functions and not any(_matches(path, entry, mutant) for mutant in mutants)
        ]


def load_equivalents(mutants: Iterable[Mutant], path: Path | None = None) -> Equivalents:
    """The list ``path``, or those beside the sources of ``mutants`` and in the packages that these lie in.

    Raises KernelLoadError for one that is invalid.
    """
    folders = sorted({folder for mutant in mutants for folder in _folders(mutant.path.parent)})
    paths = [path] if path is not None else list(filter(is_regular_file, (folder / FILE_NAME for folder in folders)))
    return Equivalents([(one.resolve().parent / entry.file, entry) for one in paths for entry in _read(one)])


def _folders(folder: Path) -> list[Path]:
    """``folder`` and the packages that it lies in."""
    packages = itertools.takewhile(lambda one: (one / "__init__.py").is_file(), (folder, *folder.parents))
    return list(dict.fromkeys((folder, *packages)))


def _read(path: Path) -> tuple[EquivalentMutant, ...]:
    try:
        entries = msgspec.toml.decode(read_data_file(path, _MOST_BYTES), type=_List).equivalent
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        reason = getattr(error, "strerror", error)
        raise KernelLoadError(f"the list of equivalent mutants {path} cannot be read: {reason}; repair it") from error
    for entry in entries:
        if len(entry.reason.split()) < 4 or len(entry.reason) < _LEAST_REASON:
            raise KernelLoadError(
                f"{path}: reason={entry.reason!r} of {entry.becomes!r} is no argument; write why no permitted input "
                "can tell the mutant from the kernel"
            )
    return entries


def _matches(path: Path, entry: EquivalentMutant, mutant: Mutant) -> bool:
    return (
        path == mutant.path
        and (entry.function, entry.operator) == (mutant.function, mutant.operator)
        and _lines(entry.line) == _lines("\n".join(mutant.before))
        and _lines(entry.becomes) == _lines("\n".join(mutant.after))
    )


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]
