"""What runs: bounds of loops, guards for what is empty, results that are not stored."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from attnfuzz.mutation.source import Change, Function

__all__ = ["guard", "range_bound", "store"]

_STORES = ("store", "atomic_add", "atomic_max", "atomic_xchg")


def range_bound(function: Function) -> Iterator[Change]:
    """``range(start, end, step)`` with one of them off by one."""
    for loop in function.all(ast.For):
        call = loop.iter
        if not isinstance(call, ast.Call) or not _is_range(function, call):
            continue
        if len(call.args) > 1:
            yield function.replaced(call.args[0], _plus(function, call.args[0], "+ 1"))
        end = call.args[0] if len(call.args) == 1 else call.args[1]
        yield from (function.replaced(end, _plus(function, end, by)) for by in ("- 1", "+ 1"))
        for step in call.args[2:]:
            yield from (function.replaced(step, _plus(function, step, by)) for by in ("- 1", "+ 1"))


def guard(function: Function) -> Iterator[Change]:
    """A choice that is always made in the same way; a program, or a loop, that does not end early."""
    for node in function.nodes:
        if isinstance(node, ast.Call) and function.triton_name(node) == "where" and len(node.args) == 3:
            yield from (function.replaced_by(node, value) for value in node.args[1:])
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return | ast.Break | ast.Continue):
            yield function.replaced(node.test, "False")


def store(function: Function) -> Iterator[Change]:
    """A result that is not stored."""
    for node in function.all(ast.Expr):
        if function.triton_name(node.value) in _STORES:
            yield function.replaced(node, "pass")


def _is_range(function: Function, call: ast.Call) -> bool:
    is_pythons = isinstance(call.func, ast.Name) and call.func.id == "range"
    return bool(call.args) and (is_pythons or function.triton_name(call) in ("range", "static_range"))


def _plus(function: Function, node: ast.expr, by: str) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return str(node.value + (1 if by == "+ 1" else -1))
    text = function.text(node)
    return f"{text} {by}" if isinstance(node, ast.Name | ast.Call | ast.Attribute) else f"({text}) {by}"
