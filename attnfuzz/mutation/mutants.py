"""A mutant: one change to one function, and how it is told from others and shown."""

from __future__ import annotations

import ast
import difflib
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from attnfuzz.declaration import Declaration
from attnfuzz.mutation.operators.catalogue import changes
from attnfuzz.mutation.reachable import Reach
from attnfuzz.mutation.source import Function, Source

__all__ = ["Mutant", "mutants_of"]


@dataclass(frozen=True)
class Mutant:
    """``path`` with ``data`` in place of what it holds; ``kernels`` run the function that is changed.

    ``before`` and ``after`` are the lines that differ, from ``line`` on; ``occurrence`` tells those apart that are
    alike.
    """

    operator: str
    path: Path
    function: str
    line: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    data: bytes
    kernels: tuple[Declaration, ...]
    occurrence: int = 1

    @cached_property
    def id(self) -> str:
        """Stays the same for as long as the lines that it changes do."""
        text = "\n".join([*self.before, "", *self.after, str(self.occurrence)])
        return f"{self.path.stem}.{self.function}.{self.operator}.{zlib.crc32(text.encode()):08x}"

    @property
    def place(self) -> str:
        """File and line, the file as seen from here if it lies below."""
        path = self.path if not self.path.is_relative_to(Path.cwd()) else self.path.relative_to(Path.cwd())
        return f"{os.fspath(path)}:{self.line}"

    @property
    def diff(self) -> list[str]:
        """The lines that differ, marked as in a unified diff."""
        removed, added = (f"-{line}" for line in self.before), (f"+{line}" for line in self.after)
        return [f"@@ {self.place} {self.function} @@", *removed, *added]


def mutants_of(declarations: Iterable[Declaration]) -> list[Mutant]:
    """All mutants of the code that the kernels run, in the order of their files; each once, whoever runs it.

    Raises KernelLoadError for source that cannot be read.
    """
    reach = Reach()
    functions: dict[tuple[Path, str], Function] = {}
    kernels: dict[tuple[Path, str], list[Declaration]] = {}
    for declaration in declarations:
        for function in reach.functions(declaration):
            place = function.source.path, function.name
            functions[place] = function
            kernels.setdefault(place, []).append(declaration)
    found = (mutant for place, one in functions.items() for mutant in _mutants(one, tuple(kernels[place])))
    return sorted(found, key=lambda mutant: (mutant.path, mutant.line))


def _mutants(function: Function, kernels: tuple[Declaration, ...]) -> Iterator[Mutant]:
    source = function.source
    seen = {_meaning(source.data)}
    counted: dict[tuple[str, tuple[str, ...], tuple[str, ...]], int] = {}
    for operator, change in changes(function):
        data = change.applied_to(source.data)
        meaning = _meaning(data)
        if meaning in seen:
            continue
        seen.add(meaning)
        line, before, after = _difference(source, data)
        key = operator, before, after
        counted[key] = counted.get(key, 0) + 1
        yield Mutant(operator, source.path, function.name, line, before, after, data, kernels, counted[key])


def _meaning(data: bytes) -> object:
    """What a parser makes of a file, its comments and spaces aside; a mutant that is not Python keeps its text."""
    try:
        return hash(ast.dump(ast.parse(data)))
    except SyntaxError:
        return data


def _difference(source: Source, data: bytes) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """The number of the first line that differs, and the lines that do, before and after."""
    before, after = source.data.decode().splitlines(), data.decode().splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    changed = [block for block in matcher.get_opcodes() if block[0] != "equal"]
    (_, start, _, start_after, _), (_, _, end, _, end_after) = changed[0], changed[-1]
    return start + 1, tuple(before[start:end]), tuple(after[start_after:end_after])
