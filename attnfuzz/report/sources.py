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
    root, entry, name = entry_of(target)
    is_bundled = entry == _BUNDLED
    if is_bundled:
        name = definition_of((root / entry).read_text(encoding="utf-8"), name)
    sources = KernelSources(entry.as_posix(), name)
    if is_bundled:
        _collect_needed(root, entry, sources)
    else:
        _collect(root, entry, sources, only_needed=entry.parts[:2] == ("attnfuzz", "adapters"))
    return sources


@dataclass(frozen=True)
class InlineSource:
    """A kernel's source as it can stand in a script: ``before_all`` at its top, ``text``, in which ``name`` is it."""

    text: str
    name: str
    before_all: tuple[str, ...] = ()


def inlined(sources: KernelSources) -> InlineSource | None:
    """The parts of its file that the kernel needs, without its declaration; None where it needs other files."""
    if len(sources.files) > 1:
        return None
    (text,) = sources.files.values()
    bare = only_what_it_needs(_without_declarations(text), sources.attribute, docstring=False)
    tree = ast.parse(bare)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if names & {"attnfuzz", "__file__", "__name__"} or any("attnfuzz" in one for one in _modules_of(tree)):
        return None
    future = tuple(ast.unparse(node) for node in tree.body if _is_future(node))
    rest = "\n".join(line for line in bare.splitlines() if line not in future).strip("\n")
    return InlineSource(rest, sources.attribute, future)


def _without_declarations(text: str) -> str:
    """``text`` without the decorators that declare kernels."""
    lines: list[str | None] = list(text.splitlines())
    for node in ast.walk(ast.parse(text)):
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if any(isinstance(part, ast.Name) and part.id == "attnfuzz" for part in ast.walk(decorator)):
                first, last = decorator.lineno - 1, decorator.end_lineno or decorator.lineno
                lines[first:last] = [None] * (last - first)
    return "\n".join(line for line in lines if line is not None) + "\n"


def _modules_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def entry_of(target: str) -> tuple[Path, Path, str]:
    """A folder, the file in it that declares the kernel, and the name that the kernel has there. Raises SourceError."""
    place, _, name = target.rpartition(":")
    if not place:
        return _PACKAGE.parent, _BUNDLED, name
    if place.endswith(".py"):
        path = Path(place).resolve()
        return path.parent, Path(path.name), name
    return *_find_module(module_of(place)), name


def _find_module(module: str) -> tuple[Path, Path]:
    """The folder on the module path that ``module`` is found in, and its file there."""
    roots = [_PACKAGE.parent] if module.startswith("attnfuzz.") else map(Path, search_path())  # may be no path entry
    for root in roots:
        for file in _module_files(module.split(".")):
            if (root / file).is_file():
                return root.resolve(), file
    raise SourceError(f"the source file of module {module!r} was not found; give the kernel as path/to/file.py:name")


def _collect(root: Path, file: Path, sources: KernelSources, *, only_needed: bool = False) -> None:
    """Put ``file`` and what it imports, in turn, into ``sources``; ``only_needed`` keeps what the kernel needs."""
    try:
        text = (root / file).read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError) as error:  # ValueError: not UTF-8, or null bytes
        raise SourceError(f"kernel source {file} cannot be read ({error}); repair the file") from error
    if only_needed:
        text = only_what_it_needs(text, sources.attribute)
        tree = ast.parse(text)
    sources.files[file.as_posix()] = text
    for imported in _imported_files(tree, file):
        folder = _PACKAGE.parent if imported.parts[0] == "attnfuzz" else root
        is_ours = imported.parts[0] == "attnfuzz" and imported.parts[1:2] not in (("kernels",), ("adapters",))
        if not is_ours and imported.as_posix() not in sources.files and (folder / imported).is_file():
            _collect(folder, imported, sources)


def _collect_needed(root: Path, entry: Path, sources: KernelSources) -> None:
    """Put into ``sources`` of each file of a bundled kernel what it needs of that: they import names, or modules whose
    attributes they take."""
    wanted: dict[Path, set[str]] = {entry: {sources.attribute}}
    texts: dict[Path, str] = {}
    left = [entry]
    while left:
        file = left.pop()
        texts[file] = only_what_it_needs((root / file).read_text(encoding="utf-8"), *wanted[file], docstring=False)
        for imported, names in _names_imported(root, ast.parse(texts[file])):
            known = wanted.setdefault(imported, set())
            if imported not in texts or not names <= known:
                known |= names
                left.append(imported)
    sources.files.update((file.as_posix(), text) for file, text in texts.items())
    for file in texts:
        for folder in [*file.parents][:-2]:  # packages, whose files import nothing
            sources.files.setdefault((folder / "__init__.py").as_posix(), "")


def _names_imported(root: Path, tree: ast.Module) -> Iterator[tuple[Path, set[str]]]:
    """The bundled files that ``tree`` imports something of, and what."""
    attributes = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("attnfuzz.kernels"):
            continue
        place = Path(*str(node.module).split("."))
        for alias in node.names:
            if (root / (module := (place / alias.name).with_suffix(".py"))).is_file():
                # ``attributes`` holds only those whose value is an ``ast.Name``, which mypy cannot see.
                of_it = (one for one in attributes if one.value.id == (alias.asname or alias.name))  # type: ignore[attr-defined]
                yield module, {one.attr for one in of_it}
            else:
                whole = place.with_suffix(".py")
                yield (whole if (root / whole).is_file() else place / "__init__.py"), {alias.name}


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


def only_what_it_needs(source: str, *names: str, docstring: bool = True) -> str:
    """The statements of ``source`` that bind ``names`` or what these refer to, in their order, after its docstring."""
    tree = ast.parse(source)
    wanted = set(names)
    while (more := wanted | _names_used(tree, wanted)) != wanted:
        wanted = more
    said = ast.get_docstring(tree, clean=False) if docstring else None
    head = source[: source.index(said) + len(said) + 3] if said else ""
    kept = filter(None, (_text(source, node, wanted) for node in tree.body))
    return "\n\n".join(filter(None, (head, *kept))) + "\n"


def definition_of(source: str, name: str) -> str:
    """The function of ``source`` that is called ``name`` or declared with ``name=name``. Raises LookupError."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        if name in (function.name, *declared_names(function)):
            return function.name
    raise LookupError(f"no function {name!r} among {', '.join(function.name for function in functions)}")


def declared_names(function: ast.FunctionDef | ast.ClassDef) -> Iterator[object]:
    """Names that decorators give it with ``name=``."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call):
            named = (keyword.value for keyword in decorator.keywords if keyword.arg == "name")
            yield from (value.value for value in named if isinstance(value, ast.Constant))


def _names_used(tree: ast.Module, wanted: set[str]) -> set[str]:
    """Names that occur in the statements that bind one of ``wanted``."""
    used = [node for node in tree.body if wanted & _names_bound(node) and not _is_import(node)]
    return {inner.id for node in used for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _names_bound(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    stored = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store))
    return {inner.id for inner in stored}


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _text(source: str, node: ast.stmt, wanted: set[str]) -> str | None:
    """The statement's own text; of an import, only what is wanted. None if nothing of it is."""
    if _is_future(node):
        return ast.unparse(node)
    if not wanted & _names_bound(node):
        return None
    if isinstance(node, ast.Import | ast.ImportFrom):
        node.names = [alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) in wanted]
        return ast.unparse(node)
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])
