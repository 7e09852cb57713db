"""The source text of a kernel and of the local files that it imports, found without importing any of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import attnfuzz
from attnfuzz.adapters import module_of
from attnfuzz.declaration import KernelLoadError, parts_of
from attnfuzz.project import search_path
from attnfuzz.report.shake import definition_of, only_what_it_needs

__all__ = ["KernelSources", "SourceError", "kernel_sources"]

_PACKAGE = Path(attnfuzz.__file__).parent
_BUNDLED = Path("attnfuzz", "kernels", "bundled.py")


class SourceError(KernelLoadError):
    """A kernel's source text cannot be had; the message is one sentence."""


@dataclass(frozen=True)
class KernelSources:
    """``files``: text by path relative to the folder that holds them all; ``entry``, one of them, has ``attribute``."""

    entry: str
    attribute: str
    files: dict[str, str] = field(default_factory=dict)


def kernel_sources(target: str) -> KernelSources:
    """The files of the kernel that ``target`` loads: a bundled name, ``module:name`` or ``path/to/file.py:name``.

    Local files are those under the folder that ``target``'s file or package lies in. Raises SourceError.
    """
    if parts_of(target) is not None:
        raise SourceError(f"{target} is two kernels, and a script is made of one; replay the case with attnfuzz")
    place, _, name = target.rpartition(":")
    if not place:
        root, entry = _PACKAGE.parent, _BUNDLED
        name = definition_of((root / entry).read_text(encoding="utf-8"), name)
    elif place.endswith(".py"):
        path = Path(place).resolve()
        root, entry = path.parent, Path(path.name)
    else:
        root, entry = _find_module(module_of(place))
    sources = KernelSources(entry.as_posix(), name)
    _collect(root, entry, sources, shake=not place or entry.parts[:2] == ("attnfuzz", "adapters"))
    return sources


def _find_module(module: str) -> tuple[Path, Path]:
    """The folder on the module path that ``module`` is found in, and its file there."""
    roots = [_PACKAGE.parent] if module.startswith("attnfuzz.") else map(Path, search_path())  # may be no path entry
    for root in roots:
        for file in _module_files(module.split(".")):
            if (root / file).is_file():
                return root.resolve(), file
    raise SourceError(f"the source file of module {module!r} was not found; give the kernel as path/to/file.py:name")


def _collect(root: Path, file: Path, sources: KernelSources, *, shake: bool = False) -> None:
    """Put ``file`` and what it imports, in turn, into ``sources``; ``shake`` reduces it to what the kernel needs."""
    try:
        text = (root / file).read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError) as error:  # ValueError: not UTF-8, or null bytes
        raise SourceError(f"kernel source {file} cannot be read ({error}); repair the file") from error
    if shake:
        text = only_what_it_needs(text, sources.attribute)
        tree = ast.parse(text)
    sources.files[file.as_posix()] = text
    for imported in _imported_files(tree, file):
        folder = _PACKAGE.parent if imported.parts[0] == "attnfuzz" else root
        is_ours = imported.parts[0] == "attnfuzz" and imported.parts[:2] != ("attnfuzz", "kernels")
        if not is_ours and imported.as_posix() not in sources.files and (folder / imported).is_file():
            _collect(folder, imported, sources)


def _imported_files(tree: ast.Module, file: Path) -> Iterator[Path]:
    """Every file that an import in ``tree`` could mean, packages' own files included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_packages(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = list(file.parent.parts[: len(file.parent.parts) - node.level + 1]) if node.level else []
            parts = [*base, *(node.module.split(".") if node.module else [])]
            yield from _with_packages(parts)
            for alias in node.names:
                yield from _module_files([*parts, alias.name])


def _with_packages(parts: list[str]) -> Iterator[Path]:
    for length in range(1, len(parts) + 1):
        yield from _module_files(parts[:length])


def _module_files(parts: list[str]) -> Iterator[Path]:
    if parts:
        yield Path(*parts).with_suffix(".py")
        yield Path(*parts, "__init__.py")
