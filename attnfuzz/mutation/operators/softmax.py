"""The online softmax: what it begins with, how it is carried on, its exponents, scale, precision and result."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from attnfuzz.mutation.operators.addresses import is_stride
from attnfuzz.mutation.operators.masks import is_infinite
from attnfuzz.mutation.source import Change, Function

__all__ = [
    "axis", "exp_base", "initial_value", "min_max", "normalisation", "precision", "rescale", "scale", "sign", "update",
]  # fmt: skip

_OTHER_BASE = {"exp": "exp2", "exp2": "exp", "log": "log2", "log2": "log"}
_OPPOSITE = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max"}
_REDUCTIONS = ("sum", "max", "min", "argmax", "argmin", "reduce", "xor_sum")


def initial_value(function: Function) -> Iterator[Change]:
    """The running maximum begins with 0 or a number that is not small enough, a sum with 1."""
    for call in function.all(ast.Call):
        if function.triton_name(call) != "full" or len(call.args) < 2:
            continue
        value = call.args[1]
        if is_infinite(value):
            yield function.replaced(value, "0.0")
            yield function.replaced(value, "-5e4")
        elif isinstance(value, ast.Constant) and value.value == 0:
            yield function.replaced(value, "1.0")
    for node in function.all(ast.BinOp):
        if isinstance(node.op, ast.Sub) and is_infinite(node.right) and function.triton_name(node.left) == "zeros":
            yield function.replaced_by(node, node.left)


def rescale(function: Function) -> Iterator[Change]:
    """An accumulator that is not multiplied with anything when the maximum moves."""
    for statement in function.all(ast.Assign):
        names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
        for node in ast.walk(statement.value):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                for carried in (node.left, node.right):
                    if isinstance(carried, ast.Name) and carried.id in names:
                        yield function.replaced_by(node, carried)
    for update_ in function.all(ast.AugAssign):
        if isinstance(update_.op, ast.Mult):
            yield function.replaced(update_, "pass")


def update(function: Function) -> Iterator[Change]:
    """In a loop: a variable that keeps its old value, or an accumulator that forgets it."""
    for node in function.nodes:
        if not isinstance(node, ast.stmt) or not function.is_in_loop(node):
            continue
        match node:
            case ast.Assign(targets=[ast.Name()], value=ast.Name()):
                yield function.replaced(node, "pass")
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.BinOp(left=left, op=ast.Add(), right=right) as value
            ):
                if any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(left)):
                    yield function.replaced_by(value, right)
            case ast.AugAssign(op=ast.Add() | ast.Sub(), target=target, value=added):
                yield function.replaced(node, "pass")
                yield function.replaced(node, f"{function.text(target)} = {function.text(added)}")


def exp_base(function: Function) -> Iterator[Change]:
    """Powers of 2 for powers of e, logarithms likewise, and the other way round."""
    for call in function.all(ast.Call):
        name = function.triton_name(call)
        if name in _OTHER_BASE and isinstance(call.func, ast.Attribute):
            yield function.replaced(call.func, f"{function.text(call.func.value)}.{_OTHER_BASE[name]}")


def min_max(function: Function) -> Iterator[Change]:
    """The smaller for the larger, and the other way round."""
    for call in function.all(ast.Call):
        name = function.triton_name(call)
        if name in _OPPOSITE and isinstance(call.func, ast.Attribute):
            yield function.replaced(call.func, f"{function.text(call.func.value)}.{_OPPOSITE[name]}")


def sign(function: Function) -> Iterator[Change]:
    """``+`` for ``-`` and the other way round, outside addresses; -inf for inf."""
    for node in function.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            if _is_address(function, node) or is_infinite(node.right):
                continue
            old, new = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            start, end = function.source.span(node.left)[1], function.source.span(node.right)[0]
            yield Change(start, end, function.source.data[start:end].decode().replace(old, new, 1).encode())
        elif isinstance(node, ast.Call) and is_infinite(node) and isinstance(node.func, ast.Name):
            text = function.text(node)
            if "-" not in text:
                yield function.replaced(node, text.replace("inf", "-inf"))


def scale(function: Function) -> Iterator[Change]:
    """The softmax scale left out, or applied twice."""
    for product in function.all(ast.BinOp):
        if not isinstance(product.op, ast.Mult):
            continue
        for factor, rest in ((product.left, product.right), (product.right, product.left)):
            if isinstance(factor, ast.Name) and "scale" in factor.id.lower():
                yield function.replaced_by(product, rest)
                yield function.replaced(factor, f"({factor.id} * {factor.id})")


def precision(function: Function) -> Iterator[Change]:
    """float16 where the kernel computes in float32."""
    for node in function.all(ast.Attribute):
        is_value = isinstance(function.parent(node), ast.Call | ast.keyword)
        if is_value and function.language_attribute(node) == "float32":
            yield function.replaced(node, function.text(node).replace("float32", "float16"))


def axis(function: Function) -> Iterator[Change]:
    """A reduction over the other axis, a vector as a row instead of a column."""
    for call in function.all(ast.Call):
        if function.triton_name(call) in _REDUCTIONS:
            named = [keyword.value for keyword in call.keywords if keyword.arg == "axis"]
            for value in (*named, *call.args[1:2]):
                if function.text(value) in ("0", "1"):
                    yield function.replaced(value, "0" if function.text(value) == "1" else "1")
    for subscript in function.all(ast.Subscript):
        match subscript.slice:
            case ast.Tuple(elts=[ast.Slice() as all_, ast.Constant(value=None) as none]) as both:
                yield function.replaced(both, f"{function.text(none)}, {function.text(all_) or ':'}")
            case ast.Tuple(elts=[ast.Constant(value=None) as none, ast.Slice() as all_]) as both:
                yield function.replaced(both, f"{function.text(all_) or ':'}, {function.text(none)}")


def normalisation(function: Function) -> Iterator[Change]:
    """A numerator that is not divided."""
    for node in function.all(ast.BinOp):
        if isinstance(node.op, ast.Div):
            yield function.replaced_by(node, node.left)


def _is_address(function: Function, node: ast.AST) -> bool:
    """Whether it adds up to a pointer: with strides in it, or in the first argument of a load or store."""
    if any(isinstance(one, ast.Name) and is_stride(one.id) for one in ast.walk(node)):
        return True
    inner: ast.AST = node
    for outer in function.ancestors(node):
        if function.triton_name(outer) in ("load", "store") and isinstance(outer, ast.Call):
            return bool(outer.args) and outer.args[0] is inner
        inner = outer
    return False
