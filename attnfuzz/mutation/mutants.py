"""Mutants: one change to one function each, of all code that a kernel reaches in its own file and beside it.

And what became of them, as it is measured, written as JSON and shown, with figures over many.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import statistics
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.isolation.devices import Device
from attnfuzz.mutation.operators import changes
from attnfuzz.mutation.source import Function, Source
from attnfuzz.report.sources import declared_names, entry_of
from attnfuzz.verdict import Failure


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


def mutants_of(declarations: Iterable[Declaration], *, device: Device = "cpu") -> list[Mutant]:
    """All mutants of the code that kernels run on ``device``, in the order of their files; each once, whoever runs it.

    Raises KernelLoadError for source that cannot be read.
    """
    reach = Reach()
    functions: dict[tuple[Path, str], Function] = {}
    kernels: dict[tuple[Path, str], list[Declaration]] = {}
    for declaration in declarations:
        for function in reach.functions(declaration):
            if function.is_gluon and device == "cpu":
                continue
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
    """The syntax tree of a file, without comments and spaces; a mutant that is not Python keeps its text."""
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


class Reach:
    """Follows names from file to file; every file is read once. Raises KernelLoadError for one that is not Python."""

    def __init__(self) -> None:
        self._sources: dict[Path, Source] = {}
        self._imports: dict[Path, _Imports] = {}

    def functions(self, declaration: Declaration) -> list[Function]:
        """The functions that the kernel may run, itself included, in the order in which they are met."""
        root, file, name = entry_of(declaration.target)
        found: dict[tuple[Path, str], Function] = {}
        seen: set[tuple[Path, str]] = set()
        waiting = [((root / file).resolve(), name)]
        while waiting:
            place = waiting.pop(0)
            if place in seen:
                continue
            seen.add(place)
            source = self._source(place[0])
            waiting += self._imports[place[0]].names.get(place[1], ())
            for node in _definitions(source, place[1]):
                if isinstance(node, ast.FunctionDef):
                    found[place] = Function(source, node)
                waiting += self._used(source, node)
        return list(found.values())

    def _source(self, path: Path) -> Source:
        if path not in self._sources:
            self._sources[path] = Source(path)
            self._imports[path] = _imports_of(self._sources[path])
        return self._sources[path]

    def _used(self, source: Source, node: ast.AST) -> Iterator[tuple[Path, str]]:
        """Files and names that ``node`` may mean."""
        modules = self._imports[source.path]
        for used in ast.walk(node):
            if isinstance(used, ast.Name):
                yield source.path, used.id
            elif isinstance(used, ast.Attribute) and isinstance(used.value, ast.Name):
                yield from ((file, used.attr) for file in modules.files.get(used.value.id, ()))


class _Imports:
    """The meaning of a file's imports: for a name of its own the names in other files, or other files themselves."""

    def __init__(self) -> None:
        self.names: dict[str, list[tuple[Path, str]]] = {}
        self.files: dict[str, list[Path]] = {}


def _imports_of(source: Source) -> _Imports:
    imports = _Imports()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname or "." not in alias.name:
                    imports.files[alias.asname or alias.name] = _files(source.path, alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), _package_of(source.path, node))
            for alias in node.names:
                name = alias.asname or alias.name
                imports.names[name] = [(file, alias.name) for file in _files(source.path, module)]
                imports.files[name] = _files(source.path, f"{module}.{alias.name}")
    return imports


def _package_of(path: Path, node: ast.ImportFrom) -> str:
    """A name with as many levels as a relative import needs; only its last parts are ever looked at."""
    return ".".join(path.parent.parts[-max(1, node.level) :])


def _files(importer: Path, module: str) -> list[Path]:
    """The file that an import of ``module`` would run, if it lies beside ``importer`` or elsewhere in its package."""
    parts = module.split(".")
    for folder in importer.parents[: len(parts) + 1]:
        for skipped in range(len(parts)):
            is_meant = folder.name == parts[skipped - 1] if skipped else folder == importer.parent
            base = folder.joinpath(*parts[skipped:])
            for file in (base.with_suffix(".py"), base / "__init__.py"):
                if is_meant and file.is_file() and file.resolve() != importer:
                    return [file.resolve()]
    return []


def _definitions(source: Source, name: str) -> Iterator[ast.AST]:
    """The statements at the top level that define ``name``, or a function declared as a kernel of that name."""
    for node in source.tree.body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                if node.name == name or name in declared_names(node):
                    yield node
            case ast.Assign(targets=targets):
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    yield node
            case ast.AnnAssign(target=ast.Name(id=target)) if target == name:
                yield node


Status = Literal["killed", "survived", "equivalent", "stillborn", "error"]


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """How a mutant was found, ``seconds`` after the hunt for it began, as the last of ``cases`` cases.

    The failure was seen ``first_seen_s`` after that; the rest went into having it come back in a fresh process.
    A command that kills leaves only ``by`` and ``seconds``.
    """

    by: str
    seconds: float
    first_seen_s: float = 0.0
    kernel: str = ""
    cases: int = 0
    case: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None
    flaky: bool = False


class MutantOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one mutant.

    ``detail`` says why it is equivalent, stillborn or an error. ``cases`` were judged in ``seconds``.
    """

    status: Status
    seconds: float = 0.0
    cases: int = 0
    kill: Kill | None = None
    detail: str = ""


Pair = tuple[Mutant, MutantOutcome]


class Score:
    """Figures over mutants and their outcomes."""

    def __init__(self, outcomes: Iterable[Pair]) -> None:
        self.outcomes: Sequence[Pair] = tuple(outcomes)

    def of(self, status: Status) -> list[Pair]:
        """The mutants of which that became."""
        return [pair for pair in self.outcomes if pair[1].status == status]

    @cached_property
    def counts(self) -> Counter[Status]:
        """How many mutants there are of each status."""
        return Counter(outcome.status for _, outcome in self.outcomes)

    @property
    def share(self) -> float:
        """Killed mutants among those that run and are not equivalent, from 0 to 1; 1 if there are none."""
        killed, survived = self.counts["killed"], self.counts["survived"]
        return killed / (killed + survived) if killed + survived else 1.0

    @cached_property
    def kills(self) -> list[Kill]:
        """All kills."""
        return [outcome.kill for _, outcome in self.of("killed") if outcome.kill is not None]

    @property
    def median_s(self) -> float:
        """Half of the killed mutants were killed within so many seconds; 0 without any."""
        return statistics.median(kill.seconds for kill in self.kills) if self.kills else 0.0

    @property
    def longest_s(self) -> float:
        """All killed mutants were killed within so many seconds."""
        return max((kill.seconds for kill in self.kills), default=0.0)

    def by_operator(self) -> dict[str, Score]:
        """The score of each operator's mutants, by its name."""
        names = sorted({mutant.operator for mutant, _ in self.outcomes})
        return {name: Score(pair for pair in self.outcomes if pair[0].operator == name) for name in names}
