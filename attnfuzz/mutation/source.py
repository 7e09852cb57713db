"""A Python file as syntax and as bytes: found in the one, changed in the other, so that all else stays as it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from attnfuzz.declaration import KernelLoadError

Node = TypeVar("Node", bound=ast.AST)


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes ``[start, end)`` of a file are replaced by ``new``."""

    start: int
    end: int
    new: bytes

    def applied_to(self, data: bytes) -> bytes:
        """``data`` with the change."""
        return data[: self.start] + self.new + data[self.end :]


class Source:
    """The file ``path``. Raises KernelLoadError if it cannot be read as Python."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.data = path.read_bytes()
            self.tree = ast.parse(self.data)
        except (OSError, ValueError, SyntaxError) as error:  # ValueError: not UTF-8, or null bytes
            raise KernelLoadError(f"kernel source {path} cannot be read ({error}); repair the file") from error

    @cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        for line in self.data.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The bytes of ``node``, without parentheses around it."""
        line, column = getattr(node, "lineno"), getattr(node, "col_offset")  # noqa: B009 - not every node has them
        end_line, end_column = getattr(node, "end_lineno"), getattr(node, "end_col_offset")  # noqa: B009 - as above
        return self._line_starts[line - 1] + column, self._line_starts[end_line - 1] + end_column

    def text(self, node: ast.AST) -> str:
        """The source text of ``node``."""
        start, end = self.span(node)
        return self.data[start:end].decode()

    @cached_property
    def language_names(self) -> frozenset[str]:
        """Names of ``triton.language`` in the file."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.asname for alias in node.names if alias.name == "triton.language" and alias.asname}
            elif isinstance(node, ast.ImportFrom) and node.module == "triton":
                found |= {alias.asname or alias.name for alias in node.names if alias.name == "language"}
        return frozenset(found) or frozenset({"tl"})


class Function:
    """A function at the top level of ``source``: its body is what is looked at, docstring left out."""

    def __init__(self, source: Source, node: ast.FunctionDef) -> None:
        self.source = source
        self.node = node
        has_docstring = ast.get_docstring(node, clean=False) is not None
        self.body = node.body[1:] if has_docstring else node.body
        self._parents = {child: parent for parent in ast.walk(node) for child in ast.iter_child_nodes(parent)}

    @property
    def name(self) -> str:
        """As the file calls it."""
        return self.node.name

    @cached_property
    def is_kernel(self) -> bool:
        """Whether Triton compiles it."""
        return any("jit" in self.source.text(decorator) for decorator in self.node.decorator_list)

    @cached_property
    def is_gluon(self) -> bool:
        """Whether Gluon compiles it, which no interpreter runs."""
        return any(self.source.text(decorator).startswith("gluon.jit") for decorator in self.node.decorator_list)

    @cached_property
    def parameters(self) -> list[str]:
        """The names of its parameters."""
        arguments = self.node.args
        return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes that stand for a piece of text, in its order."""
        found = (node for statement in self.body for node in ast.walk(statement))
        return sorted((node for node in found if hasattr(node, "lineno")), key=self.source.span)

    def all(self, kind: type[Node]) -> Iterator[Node]:
        """The nodes of a kind."""
        return (node for node in self.nodes if isinstance(node, kind))

    def parent(self, node: ast.AST) -> ast.AST:
        """The node that ``node`` is part of."""
        return self._parents[node]

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes that ``node`` is part of, from the inside out, up to the function."""
        while node is not self.node:
            node = self._parents[node]
            yield node

    def is_in_loop(self, node: ast.AST) -> bool:
        """Whether it runs again and again."""
        return any(isinstance(one, ast.For | ast.While) for one in self.ancestors(node))

    def text(self, node: ast.AST) -> str:
        """The source text of ``node``."""
        return self.source.text(node)

    def triton_name(self, node: ast.AST) -> str | None:
        """``"load"`` for a call of ``tl.load``; None for anything else."""
        return self.language_attribute(node.func) if isinstance(node, ast.Call) else None

    def language_attribute(self, node: ast.AST) -> str | None:
        """``"float32"`` for ``tl.float32``; None for anything else."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        is_language = isinstance(root, ast.Name) and root.id in self.source.language_names
        return node.attr if isinstance(node, ast.Attribute) and is_language else None

    def replaced(self, node: ast.AST, new: str) -> Change:
        """``node`` replaced by text that can stand in its place."""
        start, end = self.source.span(node)
        return Change(start, end, new.encode())

    def replaced_by(self, node: ast.AST, part: ast.AST) -> Change:
        """``node`` replaced by another expression, in parentheses if it might bind less tightly."""
        text = self.text(part)
        is_safe = not is_operation(part) or not (is_operation(self.parent(node)) or self._is_inner(node))
        return self.replaced(node, text if is_safe else f"({text})")

    def swapped(self, first: ast.AST, second: ast.AST) -> Change:
        """Two expressions in each other's place."""
        start, first_end = self.source.span(first)
        second_start, end = self.source.span(second)
        between = self.source.data[first_end:second_start].decode()
        return Change(start, end, f"{self.text(second)}{between}{self.text(first)}".encode())

    def _is_inner(self, node: ast.AST) -> bool:
        """Whether something is done with ``node``: a method called, an element taken."""
        parent = self.parent(node)
        return isinstance(parent, ast.Attribute | ast.Subscript | ast.Starred) and parent.value is node


def is_operation(node: ast.AST) -> bool:
    """Whether an expression's parts could be torn apart by an operator beside it."""
    return isinstance(node, ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.Compare | ast.IfExp | ast.Lambda)
