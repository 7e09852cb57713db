"""A module's source cut down to one of its functions and the top-level statements that it needs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["definition_of", "only_what_it_needs"]


def only_what_it_needs(source: str, function: str) -> str:
    """The statements of ``source`` that its ``function`` refers to, in turn, in their order."""
    tree = ast.parse(source)
    wanted = {function}
    while (more := wanted | _names_used(tree, wanted)) != wanted:
        wanted = more
    docstring = ast.get_docstring(tree, clean=False)
    head = source[: source.index(docstring) + len(docstring) + 3] if docstring else ""
    kept = filter(None, (_text(source, node, wanted) for node in tree.body))
    return "\n\n".join(filter(None, (head, *kept))) + "\n"


def definition_of(source: str, name: str) -> str:
    """The function of ``source`` that is called ``name`` or declared with ``name=name``. Raises LookupError."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        if name in (function.name, *_declared_names(function)):
            return function.name
    raise LookupError(f"no function {name!r} among {', '.join(function.name for function in functions)}")


def _declared_names(function: ast.FunctionDef) -> Iterator[object]:
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
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return ast.unparse(node)
    if not wanted & _names_bound(node):
        return None
    if isinstance(node, ast.Import | ast.ImportFrom):
        node.names = [alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) in wanted]
        return ast.unparse(node)
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])
