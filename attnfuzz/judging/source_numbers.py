"""Numbers in a kernel's source that the length of a sequence may be compared with, or cut by.

``if n >= 2048``, ``TILE = 64``, ``range(0, n, 128)``, ``BLOCK_N=64`` at a launch, a table of configurations: what a
kernel does may change there, and no other number of tokens shows it. They are read, and nothing is run: the functions
that the kernel's own refers to by name, in its file or in its package, as far as they can be followed. A number that is
something else costs a few cases. Torch-free.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from attnfuzz.declaration import Kernel

MOST_NUMBERS = 12
_LEAST, _MOST = 8, 1 << 15
_MOST_FUNCTIONS = 48
_MOST_WRAPPINGS = 4
_MOST_CHARACTERS = 1_000_000
"""Longest file that is read."""
_FILES_KEPT = 32
_DIVIDING = frozenset(
    {"range", "arange", "cdiv", "tl_range", "static_range", "min", "max", "minimum", "maximum", "next"}
)
_COMPARED, _NAMED = 3, 1
"""How much more likely a number is a limit of lengths that is compared with something, or divides it."""


def numbers_in_source(kernel: Kernel) -> tuple[int, ...]:
    """The numbers that are found most often, at most `MOST_NUMBERS`, ascending; none where there is no source."""
    found = Counter[int]()
    for function in _functions(kernel):
        found.update(_numbers_of(function))
    return tuple(sorted(number for number, _ in found.most_common(MOST_NUMBERS)))


def _functions(kernel: Kernel) -> Iterator[FunctionType]:
    """The kernel's own, those that its engine's adapter calls, and what these refer to, each once."""
    plan = kernel.engine_plan
    begin = [kernel.function] if plan is None else [plan.function, *(found for _, found in plan.needs.values())]
    waiting = [one for one in map(_python_function, begin) if one is not None]
    seen: dict[CodeType, None] = {}
    while waiting and len(seen) < _MOST_FUNCTIONS:
        function = waiting.pop(0)
        if function.__code__ in seen:
            continue
        seen[function.__code__] = None
        yield function
        for name in _names(function.__code__):
            other = _python_function(function.__globals__.get(name))
            if other is not None and _lie_together(function, other):
                waiting.append(other)


def _python_function(found: object) -> FunctionType | None:
    """The function itself, or that which Triton's decorators have wrapped."""
    for _ in range(_MOST_WRAPPINGS):
        if isinstance(found, FunctionType):
            function = inspect.unwrap(found)
            return function if isinstance(function, FunctionType) else None
        if found is None or inspect.isclass(found) or inspect.ismodule(found):
            return None
        wrapped = getattr(found, "__dict__", {})
        found = wrapped.get("fn", wrapped.get("__wrapped__"))
    return None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _lie_together(one: FunctionType, other: FunctionType) -> bool:
    """Whether in one file or package: what torch does, and Triton, is not the kernel's own."""
    packages = {function.__module__.partition(".")[0] for function in (one, other)}
    return one.__code__.co_filename == other.__code__.co_filename or len(packages) == 1


@functools.cache
def _numbers_of(function: FunctionType) -> Counter[int]:
    """Kernels of one engine refer to the same functions."""
    try:
        lines, _ = inspect.findsource(function)
        tree = _functions_in("".join(lines)).get(function.__code__.co_firstlineno)
    except (OSError, TypeError, SyntaxError):  # made by exec
        return Counter()
    found = Counter[int]()
    for node in ast.walk(tree) if tree is not None else ():
        for expression, weight in _places(node):
            number = _value(expression, function.__globals__)
            if number is not None and _LEAST <= number <= _MOST:
                found[number] += weight
    return found


@functools.lru_cache(_FILES_KEPT)
def _functions_in(source: str) -> dict[int, ast.AST]:
    """The functions of a file by the line that they begin at, decorators included."""
    found: dict[int, ast.AST] = {}
    for node in ast.walk(ast.parse(source)) if len(source) <= _MOST_CHARACTERS else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            decorators = getattr(node, "decorator_list", ())
            found.setdefault(min(one.lineno for one in (node, *decorators)), node)
    return found


def _places(node: ast.AST) -> Iterator[tuple[ast.expr, int]]:
    """Expressions in which a length may be compared or cut, or that are called by a name."""
    match node:
        case ast.Compare():
            yield from ((one, _COMPARED) for one in (node.left, *node.comparators))
        case ast.BinOp(op=ast.FloorDiv() | ast.Mod()):
            yield node.right, _COMPARED
        case ast.Call():
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _DIVIDING:
                yield from ((one, _COMPARED) for one in node.args)
            yield from ((keyword.value, _NAMED) for keyword in node.keywords if keyword.arg is not None)
        case ast.Assign():
            yield node.value, _NAMED
        case ast.AnnAssign(value=ast.expr() as value):
            yield value, _NAMED
        case ast.IfExp():
            yield from ((one, _NAMED) for one in (node.body, node.orelse))
        case ast.arguments():
            yield from ((one, _NAMED) for one in (*node.defaults, *node.kw_defaults) if one is not None)
        case ast.Tuple():
            yield from ((one, _NAMED) for one in node.elts)


def _value(expression: ast.expr, names: Mapping[str, Any]) -> int | None:
    """The value of a number, of a name of one at the top of the file, and of an operator's result on such."""
    match expression:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            found = names.get(name)
            found = getattr(found, "value", found)  # of a constexpr
            return found if type(found) is int else None
        case ast.BinOp(op=ast.Mult() | ast.LShift() | ast.Pow() as operator):
            left, right = _value(expression.left, names), _value(expression.right, names)
            return None if left is None or right is None else _combined(operator, left, right)
    return None


def _combined(operator: ast.operator, left: int, right: int) -> int | None:
    if not (0 <= left <= _MOST and 0 <= right <= _MOST):
        return None
    if isinstance(operator, ast.Mult):
        return left * right
    if right > _MOST.bit_length():
        return None
    return left << right if isinstance(operator, ast.LShift) else int(left**right)
