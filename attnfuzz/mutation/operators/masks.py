"""Masks: dropped, loosened, off by one, and what is loaded where they say no."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from attnfuzz.mutation.source import Change, Function

__all__ = ["bound", "comparison", "is_infinite", "mask_dropped", "mask_term", "masked_value", "other"]

_LOOSER = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
_OPPOSITE = {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "==")}
_FINITE_MINIMUM = "-5e4"
"""A number as kernels use it in place of -inf: some scores lie below it."""


def mask_term(function: Function) -> Iterator[Change]:
    """``a & b``: only one of the two."""
    for node in function.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            yield function.replaced_by(node, node.left)
            yield function.replaced_by(node, node.right)
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And) and len(node.values) == 2:
            yield from (function.replaced_by(node, value) for value in node.values)


def mask_dropped(function: Function) -> Iterator[Change]:
    """A load or store without its mask."""
    for call in function.all(ast.Call):
        name = function.triton_name(call)
        if name in ("load", "store") and (mask := _argument(call, "mask", 1 if name == "load" else 2)) is not None:
            others = [_argument(call, "other", 2)] if name == "load" else []
            yield _without(function, call, [mask, *filter(None, others)])


def comparison(function: Function) -> Iterator[Change]:
    """``<`` and ``<=``, ``>`` and ``>=``, ``==`` and ``!=`` in each other's place."""
    for node in function.all(ast.Compare):
        old, new = (_LOOSER | _OPPOSITE).get(type(node.ops[0]), ("", ""))
        if old and len(node.ops) == 1:
            left, right = function.source.span(node.left)[1], function.source.span(node.comparators[0])[0]
            between = function.source.data[left:right].decode()
            yield Change(left, right, between.replace(old, new, 1).encode())


def bound(function: Function) -> Iterator[Change]:
    """``i < n``: up to ``n - 1``. One more is what `comparison` does."""
    for node in function.all(ast.Compare):
        limit = node.comparators[0]
        if isinstance(node.ops[0], ast.Lt) and not isinstance(limit, ast.Constant) and len(node.ops) == 1:
            yield function.replaced(limit, f"({function.text(limit)} - 1)")


def other(function: Function) -> Iterator[Change]:
    """What masked elements load as: NaN for a number, 0 for an infinite one, entry 1 of a table.

    Leaving out a zero is no mutant. The documentation calls the elements undefined then (NaN, at worst), but every
    backend fills them with zeros (triton-lang/triton#10119, pytorch/pytorch#127311).
    """
    for call in function.all(ast.Call):
        if function.triton_name(call) == "load" and (value := _argument(call, "other", 2)) is not None:
            is_integer = isinstance(value, ast.Constant) and isinstance(value.value, int)
            number = "0.0" if is_infinite(value) else 'float("nan")'
            yield function.replaced(value, "1" if is_integer else number)


def masked_value(function: Function) -> Iterator[Change]:
    """The score of a masked token: 0, or a number that is not small enough."""
    for call in function.all(ast.Call):
        if function.triton_name(call) != "where":
            continue
        for value in call.args[1:]:
            if is_infinite(value) and function.text(value).count("-"):
                yield function.replaced(value, "0.0")
                yield function.replaced(value, _FINITE_MINIMUM)


def is_infinite(node: ast.AST) -> bool:
    """Whether it is written as an infinite number."""
    text = ast.unparse(node)
    return any(part in text for part in ("'inf'", "'-inf'", "math.inf", "np.inf"))


def _without(function: Function, call: ast.Call, values: list[ast.expr]) -> Change:
    """``call`` without some of its arguments, and the commas before them."""
    kept = [one for one in call.args if one not in values]
    named = [keyword for keyword in call.keywords if keyword.value not in values]
    start, end = function.source.span(call)
    first = min((*call.args, *call.keywords), key=function.source.span)
    last = max((*call.args, *call.keywords), key=function.source.span)
    head = function.source.data[start : function.source.span(first)[0]].decode()
    tail = function.source.data[function.source.span(last)[1] : end].decode()
    arguments = ", ".join(function.text(one) for one in (*kept, *named))
    return Change(start, end, f"{head}{arguments}{tail}".encode())


def _argument(call: ast.Call, name: str, position: int) -> ast.expr | None:
    """The argument of that name or at that position."""
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if named is not None or len(call.args) <= position or any(isinstance(one, ast.Starred) for one in call.args):
        return named
    return call.args[position]
