"""The code that launches kernels: the order of the grid, of tensors and of strides."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

from attnfuzz.mutation.source import Change, Function

__all__ = ["grid_order", "is_launch_code", "launch_arguments", "launch_condition", "launch_strides"]


def is_launch_code(function: Function) -> bool:
    """Whether a function, not itself compiled, launches kernels or collects strides for them."""
    return not function.is_kernel and (any(_launches(function)) or any(_stride_calls(function)))


def grid_order(function: Function) -> Iterator[Change]:
    """Two axes of the grid swapped."""
    for call in _launches(function):
        if isinstance(call.func, ast.Subscript) and isinstance(call.func.slice, ast.Tuple):
            yield from (function.swapped(*pair) for pair in pairwise(call.func.slice.elts))


def launch_arguments(function: Function) -> Iterator[Change]:
    """Two tensors or numbers, side by side, swapped."""
    for call in _launches(function):
        for first, second in pairwise(call.args):
            if isinstance(first, ast.Name) and isinstance(second, ast.Name):
                yield function.swapped(first, second)


def launch_strides(function: Function) -> Iterator[Change]:
    """Strides of the wrong tensor or axis, and those that the tensor would have if it were contiguous."""
    for call in _launches(function):
        strides = [one for one in call.args if "stride" in function.text(one)]
        for first, second in pairwise(call.args):
            if first in strides and second in strides and function.text(first) != function.text(second):
                yield function.swapped(first, second)
    for stride in _stride_calls(function):
        if isinstance(stride.func, ast.Attribute) and isinstance(function.parent(stride), ast.Starred | ast.Call):
            yield function.replaced(stride.func.value, f"{function.text(stride.func.value)}.contiguous()")
    if any(_stride_calls(function)):
        yield from _elements(function)


def launch_condition(function: Function) -> Iterator[Change]:
    """The other one of two layouts."""
    for test in function.all(ast.Compare):
        if len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq) and isinstance(test.comparators[0], ast.Constant):
            yield function.replaced(test, function.text(test).replace("==", "!=", 1))


def _elements(function: Function) -> Iterator[Change]:
    """Strides or axes in a tuple, swapped with the next, and taken from another tensor's strides."""
    tuples = [one for one in function.all(ast.Tuple) if not isinstance(function.parent(one), ast.Subscript)]
    picked = [one for each in tuples for one in each.elts if isinstance(one, ast.Subscript)]
    owners = sorted({function.text(one.value) for one in picked})
    for each in tuples:
        for first, second in pairwise(each.elts):
            is_pair = all(isinstance(one, ast.Subscript) for one in (first, second))
            is_axes = all(isinstance(one, ast.Constant) and isinstance(one.value, int) for one in (first, second))
            if is_pair or is_axes:
                yield function.swapped(first, second)
    for one in picked:
        others = (owner for owner in owners if owner != function.text(one.value))
        yield from (function.replaced(one.value, owner) for owner in others)


def _launches(function: Function) -> Iterator[ast.Call]:
    """Calls of the form ``kernel[grid](...)``."""
    return (call for call in function.all(ast.Call) if isinstance(call.func, ast.Subscript))


def _stride_calls(function: Function) -> Iterator[ast.Call]:
    return (
        call for call in function.all(ast.Call) if isinstance(call.func, ast.Attribute) and call.func.attr == "stride"
    )
