"""Addresses: strides swapped, the wrong index, rounding of divisions, 32-bit offsets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

from attnfuzz.mutation.source import Change, Function, is_operation

__all__ = ["div_mod", "index", "int64", "other_stride", "rounding", "swap_strides"]

_KEYS_AND_VALUES = (("k", "v"), ("key", "value"), ("K", "V"))


def swap_strides(function: Function) -> Iterator[Change]:
    """Two strides that stand beside each other, in an address or in the arguments of a call."""
    for statement in (node for node in function.nodes if isinstance(node, ast.stmt)):
        if isinstance(statement, ast.For | ast.While | ast.If | ast.With):
            continue
        names = sorted(
            (node for node in ast.walk(statement) if isinstance(node, ast.Name) and is_stride(node.id)),
            key=function.source.span,
        )
        for first, second in pairwise(names):
            if first.id != second.id:
                yield function.swapped(first, second)


def other_stride(function: Function) -> Iterator[Change]:
    """K's stride for V, and V's for K."""
    for name in function.all(ast.Name):
        if is_stride(name.id):
            yield from (function.replaced(name, twin) for twin in _twins(name.id) if twin in function.parameters)


def index(function: Function) -> Iterator[Change]:
    """Another index in front of a stride: of another axis, or what the index was computed from; axes of the grid."""
    programs = _programs(function)
    origins = _origins(function)
    for product in function.all(ast.BinOp):
        factor = _index_before_stride(product)
        if factor is None:
            continue
        wrong = [name for name in programs if factor.id in programs and name != factor.id]
        yield from (function.replaced(factor, name) for name in (*wrong, *origins.get(factor.id, ())))
    axes = sorted({function.text(axis) for axis in _grid_axes(function)})
    for axis in _grid_axes(function):
        yield from (function.replaced(axis, wrong) for wrong in axes if wrong != function.text(axis))


def div_mod(function: Function) -> Iterator[Change]:
    """``//`` and ``%`` in each other's place."""
    for node in function.all(ast.BinOp):
        if isinstance(node.op, ast.FloorDiv | ast.Mod):
            old, new = ("//", "%") if isinstance(node.op, ast.FloorDiv) else ("%", "//")
            start, end = function.source.span(node.left)[1], function.source.span(node.right)[0]
            yield Change(start, end, function.source.data[start:end].decode().replace(old, new, 1).encode())


def rounding(function: Function) -> Iterator[Change]:
    """A quotient rounded up instead of down, or down instead of up."""
    language = min(function.source.language_names)
    for node in function.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
            yield function.replaced(node, f"{language}.cdiv({function.text(node.left)}, {function.text(node.right)})")
        elif isinstance(node, ast.Call) and _is_cdiv(node) and len(node.args) == 2:
            up, by = map(function.text, node.args)
            yield function.replaced(node, f"(({up}) // ({by}))")


def int64(function: Function) -> Iterator[Change]:
    """Offsets in 32 bits: a conversion to int64 left out, or to int32 of something that may have had 64 bits."""
    for call in function.all(ast.Call):
        match call:
            case ast.Call(func=ast.Attribute(attr="to", value=value), args=[wide]):
                if function.language_attribute(wide) != "int64":
                    continue
                bare = function.text(value)
                yield function.replaced(call, f"({bare})" if is_operation(value) else bare)
                if any(function.triton_name(one) == "load" for one in ast.walk(value)):
                    yield function.replaced(wide, function.text(wide).replace("int64", "int32"))


def is_stride(name: str) -> bool:
    """Whether a name is one of a stride."""
    return "stride" in name.lower()


def _is_cdiv(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr == "cdiv"


def _twins(name: str) -> Iterator[str]:
    """``stride_vt`` for ``stride_kt``, and the other way round."""
    for one, two in (*_KEYS_AND_VALUES, *(pair[::-1] for pair in _KEYS_AND_VALUES)):
        twin = re.sub(rf"(?<=_){one}", two, name, count=1)
        if twin != name:
            yield twin


def _index_before_stride(product: ast.BinOp) -> ast.Name | None:
    """``i`` in ``i * stride`` or ``stride * i``."""
    if not isinstance(product.op, ast.Mult):
        return None
    left, right = product.left, product.right
    if not isinstance(left, ast.Name) or not isinstance(right, ast.Name) or is_stride(left.id) == is_stride(right.id):
        return None
    return right if is_stride(left.id) else left


def _assignments(function: Function) -> Iterator[tuple[str, ast.expr]]:
    for node in function.all(ast.Assign):
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _programs(function: Function) -> list[str]:
    """Variables that say which program this is."""
    return [name for name, value in _assignments(function) if _is_program(function, value)]


def _is_program(function: Function, value: ast.expr) -> bool:
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "to":
        value = value.func.value
    return function.triton_name(value) == "program_id"


def _grid_axes(function: Function) -> Iterator[ast.Constant]:
    for call in function.all(ast.Call):
        if function.triton_name(call) == "program_id":
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            yield from (value for value in values if isinstance(value, ast.Constant))


def _origins(function: Function) -> dict[str, list[str]]:
    """What an index was computed from: the token for its page, the entry's number for the entry of a table."""
    found: dict[str, list[str]] = {}
    for name, value in _assignments(function):
        sources: list[str] = []
        for node in ast.walk(value):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod):
                sources += [node.left.id] if isinstance(node.left, ast.Name) else []
            elif function.triton_name(node) == "load" and isinstance(node, ast.Call) and node.args:
                products = (one for one in ast.walk(node.args[0]) if isinstance(one, ast.BinOp))
                sources += [factor.id for one in products if (factor := _index_before_stride(one)) is not None]
        if sources:
            found[name] = sources
    return found
